// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/manifest.cc: writes a manifest as JSON, and reads and checks it.
#include "core/checkpoint/manifest.h"

#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/error.h"
#include "base/strict_json.h"
#include "core/checkpoint/manifest_rules.h"
#include "optimizer/state_format.h"

namespace ziggurat {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kChecksumBegin = "{\"checksum\":\"";
constexpr std::string_view kChecksumEnd = "\",\n";
constexpr std::size_t kDigits = 16;

std::string hex(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

std::string bytes_text(std::span<const std::byte> bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::byte byte : bytes)
    fmt::format_to(std::back_inserter(text), "{:02x}", static_cast<unsigned>(byte));
  return text;
}

std::vector<std::byte> bytes_of(const JsonField& field) {
  const std::string text = field.text();
  std::vector<std::byte> bytes(text.size() / 2);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    unsigned value = 0;
    std::from_chars(text.data() + 2 * i, text.data() + 2 * i + 2, value, 16);
    bytes[i] = static_cast<std::byte>(value);
  }
  if (bytes_text(bytes) != text) field.refuse("the value must be bytes in hexadecimal digits");
  return bytes;
}

ordered_json state_json(const std::optional<StateKind>& state,
                        const std::optional<Roundings>& rounding) {
  if (!state) return nullptr;
  ordered_json json{{"optimizer", to_string(state->optimizer)},
                    {"format", to_string(state->format)}};
  if (rounding) {
    json["state_rounding"] = to_string(rounding->state);
    json["param_rounding"] = to_string(rounding->params);
  }
  return json;
}

std::optional<Roundings> rounding_of(const JsonField& field) {
  if (field.is_null() || !field.has("state_rounding")) return std::nullopt;
  const auto word = [&](const char* key) {
    const std::optional<Rounding> rounding = parse_rounding(field.at(key).text());
    if (!rounding)
      field.at(key).refuse(
          fmt::format("this program does not know the rounding '{}'", field.at(key).text()));
    return *rounding;
  };
  return Roundings{.state = word("state_rounding"), .params = word("param_rounding")};
}

std::optional<StateKind> state_of(const JsonField& field) {
  if (field.is_null()) return std::nullopt;
  if (field.has("state_rounding")) {
    field.require_keys({"optimizer", "format", "state_rounding", "param_rounding"});
  } else {
    field.require_keys({"optimizer", "format"});
  }
  const auto optimizer = parse_optimizer(field.at("optimizer").text());
  const auto format = parse_state_format(field.at("format").text());
  if (!optimizer)
    field.refuse(
        fmt::format("this program does not know the optimizer '{}'", field.at("optimizer").text()));
  if (!format)
    field.refuse(
        fmt::format("this program does not know the state format '{}'", field.at("format").text()));
  return StateKind{*optimizer, *format};
}

ordered_json layout_json(const SavedLayout& layout) {
  return {{"ranks", layout.ranks},
          {"tensor_parallel", layout.tensor_parallel},
          {"zero_stage", layout.zero_stage},
          {"shard_group", layout.shard_group},
          {"placement", layout.placement}};
}

SavedLayout layout_of(const JsonField& field) {
  constexpr std::uint64_t kMax = 1U << 30;
  field.require_keys({"ranks", "tensor_parallel", "zero_stage", "shard_group", "placement"});
  return {.ranks = static_cast<int>(field.at("ranks").number(kMax)),
          .tensor_parallel = static_cast<int>(field.at("tensor_parallel").number(kMax)),
          .zero_stage = static_cast<int>(field.at("zero_stage").number(kMax)),
          .shard_group = static_cast<int>(field.at("shard_group").number(kMax)),
          .placement = field.at("placement").text()};
}

ordered_json content_json(const StateContent& content) {
  ordered_json units = ordered_json::array();
  for (const StateUnit& unit : content.units) units.push_back({unit.name, unit.params});
  ordered_json tensors = ordered_json::array();
  for (const StateTensor& tensor : content.tensors)
    tensors.push_back(
        {tensor.name, tensor.owner, tensor.array, to_string(tensor.type), tensor.shape});
  ordered_json resume = ordered_json::object();
  // Parsed into an object that sorts its keys, because one that keeps another order looks each key
  // up from the front.
  for (const auto& [name, text] : content.resume)
    resume[name] = ordered_json(nlohmann::json::parse(text));
  return {{"model", content.model},
          {"dtype", to_string(content.dtype)},
          {"state", state_json(content.state, content.rounding)},
          {"step", content.step},
          {"run_identity", content.run_identity},
          {"numerics_fingerprint", content.numerics_fingerprint},
          {"layout", layout_json(content.layout)},
          {"versions", content.versions},
          {"resume", resume},
          {"blob", bytes_text(content.blob)},
          {"units", units},
          {"tensors", tensors}};
}

ordered_json line_json(const StateLine& line) {
  return {{"id", to_text(line.id)},
          {"epoch", line.epoch},
          {"parent", line.parent ? ordered_json(to_text(*line.parent)) : ordered_json(nullptr)},
          {"left_at", line.left_at}};
}

LineId line_id_of(const JsonField& field) {
  const std::optional<LineId> id = parse_line_id(field.text());
  if (!id) field.refuse("a line's id must have 32 hexadecimal digits");
  return *id;
}

StateLine line_of(const JsonField& field) {
  field.require_keys({"id", "epoch", "parent", "left_at"});
  StateLine line{.id = line_id_of(field.at("id")),
                 .epoch = field.at("epoch").number(),
                 .parent = {},
                 .left_at = field.at("left_at").number()};
  if (!field.at("parent").is_null()) line.parent = line_id_of(field.at("parent"));
  return line;
}

StateContent content_of(const JsonField& field) {
  field.require_keys({"model", "dtype", "state", "step", "run_identity", "numerics_fingerprint",
                      "layout", "versions", "resume", "blob", "units", "tensors"});
  StateContent content;
  content.model = field.at("model").text();
  const JsonField dtype = field.at("dtype");
  if (!parse_dtype(dtype.text()))
    dtype.refuse(fmt::format("parameters cannot have the type '{}'", dtype.text()));
  content.dtype = *parse_dtype(dtype.text());
  content.state = state_of(field.at("state"));
  content.rounding = rounding_of(field.at("state"));
  content.step = field.at("step").number();
  content.run_identity = field.at("run_identity").text();
  content.numerics_fingerprint = field.at("numerics_fingerprint").text();
  content.layout = layout_of(field.at("layout"));
  for (const auto& [name, value] : field.at("versions").value().items())
    content.versions[name] = JsonField(value, field.path() + ".versions." + name).text();
  for (const auto& [name, value] : field.at("resume").value().items())
    content.resume[name] = value.dump();
  content.blob = bytes_of(field.at("blob"));
  const JsonField units = field.at("units");
  for (std::size_t u = 0; u < units.size(); ++u) {
    StateUnit& unit = content.units.emplace_back();
    unit.name = units.at(u).at(std::size_t{0}).text();
    const JsonField params = units.at(u).at(1);
    for (std::size_t p = 0; p < params.size(); ++p) unit.params.push_back(params.at(p).text());
  }
  const JsonField tensors = field.at("tensors");
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const JsonField its = tensors.at(t);
    const auto type = parse_tensor_type(its.at(3).text());
    if (!type)
      its.refuse(fmt::format("this program does not know the type '{}'", its.at(3).text()));
    content.tensors.push_back({.name = its.at(std::size_t{0}).text(),
                               .owner = its.at(1).text(),
                               .array = its.at(2).text(),
                               .type = *type,
                               .shape = its.at(4).numbers()});
  }
  return content;
}

ordered_json files_json(const Manifest& manifest) {
  ordered_json files = ordered_json::array();
  for (const StateFile& file : manifest.files)
    files.push_back({file.name, file.size_bytes, file.header_bytes, hex(file.header_hash)});
  return files;
}

ordered_json pieces_json(const Manifest& manifest) {
  ordered_json pieces = ordered_json::array();
  for (const StatePiece& piece : manifest.pieces) {
    ordered_json sizes = ordered_json::array();
    ordered_json hashes = ordered_json::array();
    for (const HashedBytes& hashed : piece.hashed) {
      sizes.push_back(hashed.size_bytes);
      hashes.push_back(hex(hashed.hash));
    }
    pieces.push_back({piece.tensor, piece.file, piece.offset_bytes, piece.box.offsets,
                      piece.box.shape, sizes, hashes});
  }
  return pieces;
}

StatePiece piece_of(const JsonField& its) {
  StatePiece piece{.tensor = static_cast<std::uint32_t>(its.at(std::size_t{0}).number(UINT32_MAX)),
                   .file = static_cast<std::uint32_t>(its.at(1).number(UINT32_MAX)),
                   .offset_bytes = its.at(2).number(),
                   .box = {.offsets = its.at(3).numbers(), .shape = its.at(4).numbers()},
                   .hashed = {}};
  const JsonField sizes = its.at(5);
  const JsonField hashes = its.at(6);
  if (sizes.size() != hashes.size())
    its.refuse(fmt::format("the piece has {} sizes, but {} hashes", sizes.size(), hashes.size()));
  for (std::size_t i = 0; i < sizes.size(); ++i)
    piece.hashed.push_back({sizes.at(i).number(), hashes.at(i).hex()});
  return piece;
}

std::vector<StateFile> files_of(const JsonField& files) {
  std::vector<StateFile> all;
  for (std::size_t f = 0; f < files.size(); ++f) {
    const JsonField its = files.at(f);
    all.push_back({.name = its.at(std::size_t{0}).text(),
                   .size_bytes = its.at(1).number(),
                   .header_bytes = its.at(2).number(),
                   .header_hash = its.at(3).hex()});
  }
  return all;
}

/// Adds files and pieces behind those that the manifest has already.
void read_files(const JsonField& top, Manifest& manifest) {
  const auto before = static_cast<std::uint32_t>(manifest.files.size());
  for (StateFile& file : files_of(top.at("files"))) manifest.files.push_back(std::move(file));
  const JsonField pieces = top.at("pieces");
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    manifest.pieces.push_back(piece_of(pieces.at(p)));
    manifest.pieces.back().file += before;
  }
}

/// Checks the checksum in the first line, and returns the text behind that line.
std::string_view proven(std::string_view text, const std::string& place) {
  const std::size_t begin = kChecksumBegin.size() + kDigits + kChecksumEnd.size();
  const bool framed =
      text.size() > begin && text.starts_with(kChecksumBegin) &&
      text.substr(kChecksumBegin.size() + kDigits, kChecksumEnd.size()) == kChecksumEnd;
  if (!framed)
    throw Error(ErrorCode::kDataLoss, fmt::format("{} does not begin with a checksum", place));
  const std::string_view rest = text.substr(begin);
  if (text.substr(kChecksumBegin.size(), kDigits) != hex(hash64(std::as_bytes(std::span(rest)), 0)))
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("the checksum of {} is wrong, because the text was changed or cut short",
                    place));
  return rest;
}

std::string body(const Manifest& manifest) {
  std::string text = fmt::format("\"schema\":{},\n", Manifest::kSchema);
  if (manifest.content.line) text += "\"line\":" + line_json(*manifest.content.line).dump() + ",\n";
  text += "\"content\":" + content_json(manifest.content).dump();
  text += ",\n\"files\":" + files_json(manifest).dump();
  text += ",\n\"pieces\":" + pieces_json(manifest).dump() + "}\n";
  return text;
}

/// Returns the value of one of the rows that body() makes; nothing if there is no such row.
std::optional<nlohmann::json> row_of(std::string_view text, std::string_view name,
                                     const std::string& place) {
  const std::string begin = fmt::format("\n\"{}\":", name);
  const std::size_t found = text.find(begin);
  if (found == std::string_view::npos) return std::nullopt;
  std::string_view row = text.substr(found + 1);
  row = row.substr(0, row.find('\n'));
  if (row.ends_with(',')) row.remove_suffix(1);
  return parse_strict(fmt::format("{{{}}}", row), place).at(std::string(name));
}

/// Returns true for a name that may be null: the run has no such value, and did not forget it.
bool may_be_null(std::string_view name) { return name == "loss_scale" || name == "best_metric"; }

}  // namespace

std::vector<std::string> missing_resume_names(const StateContent& content) {
  std::vector<std::string> missing;
  for (const std::string_view name : kResumeNames) {
    const auto found = content.resume.find(std::string(name));
    const bool there =
        found != content.resume.end() && (found->second != "null" || may_be_null(name));
    if (!there) missing.emplace_back(name);
  }
  return missing;
}

std::optional<std::uint64_t> best_step(const StateContent& content) {
  const auto found = content.resume.find("best_metric");
  if (found == content.resume.end()) return std::nullopt;
  const nlohmann::json best = nlohmann::json::parse(found->second, nullptr, false);
  if (!best.is_object() || !best.contains("step") || !best["step"].is_number_unsigned())
    return std::nullopt;
  return best["step"].get<std::uint64_t>();
}

std::string files_text(const Manifest& manifest) {
  return "{\"files\":" + files_json(manifest).dump() +
         ",\"pieces\":" + pieces_json(manifest).dump() + "}";
}

void add_files(Manifest& manifest, std::string_view text, const std::string& place) {
  const nlohmann::json json = parse_strict(text, place);
  read_files(JsonField(json, place), manifest);
}

std::string to_text(const Manifest& manifest) {
  const std::string broken = broken_rule(manifest);
  if (!broken.empty()) throw Error(ErrorCode::kInvalidArgument, "manifest: " + broken);
  const std::string rest = body(manifest);
  return fmt::format("{}{}{}{}", kChecksumBegin, hex(hash64(std::as_bytes(std::span(rest)), 0)),
                     kChecksumEnd, rest);
}

Manifest parse_manifest(std::string_view text, const std::string& place) {
  static_cast<void>(proven(text, place));
  const nlohmann::json json = parse_strict(text, place);
  const JsonField top(json, place);
  if (const std::uint64_t schema = top.at("schema").number(); schema != Manifest::kSchema) {
    top.refuse(
        fmt::format("the manifest's schema is {}, but this program reads only {}: use a newer "
                    "version of the program",
                    schema, Manifest::kSchema));
  }
  const bool has_line = top.has("line");
  if (has_line) {
    top.require_keys({"checksum", "schema", "line", "content", "files", "pieces"});
  } else {
    top.require_keys({"checksum", "schema", "content", "files", "pieces"});
  }
  Manifest manifest{.content = content_of(top.at("content")), .files = {}, .pieces = {}};
  if (has_line) manifest.content.line = line_of(top.at("line"));
  read_files(top, manifest);
  const std::string broken = broken_rule(manifest);
  if (!broken.empty()) top.refuse(broken);
  return manifest;
}

ManifestSummary summarize_manifest(std::string_view text, const std::string& place) {
  static_cast<void>(proven(text, place));
  const std::optional<nlohmann::json> content = row_of(text, "content", place);
  const std::optional<nlohmann::json> files = row_of(text, "files", place);
  if (!content || !files)
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the manifest {} has no {}", place, content ? "files" : "content"));
  ManifestSummary summary{.content = content_of(JsonField(*content, place + ".content")),
                          .files = files_of(JsonField(*files, place + ".files"))};
  summary.content.line = line_in(text, place);
  return summary;
}

std::optional<StateLine> line_in(std::string_view head, const std::string& place) {
  const std::size_t content = head.find("\n\"content\":");
  const std::optional<nlohmann::json> line = row_of(head.substr(0, content), "line", place);
  if (!line) return std::nullopt;
  return line_of(JsonField(*line, place + ".line"));
}

}  // namespace ziggurat
