// SPDX-License-Identifier: Apache-2.0
// core/sharding/chunk_table_layout.cc: writes a cut as JSON, and reads it back from a text that may
// be damaged.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <climits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/strict_json.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/packing.h"
#include "core/sharding/stored_records.h"

namespace ziggurat {
namespace {

/// Most elements of a unit, and so of a shape: sums and sizes in bytes never overflow.
constexpr std::int64_t kElementsMax = std::int64_t{1} << 50;
/// Most ranks of a store, because the names of files have five digits for a rank.
constexpr std::uint64_t kRanksMax = 100'000;

/// Says how masters become parameters. The text is part of a layout, and so of the layout's hash.
std::string_view param_text(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return "bf16, nearest, ties away";
    case DType::kFloat16: return "fp16, nearest, ties to even";
    case DType::kFloat32: break;
  }
  return "fp32";
}

/// `shared` is the format of records that parameters share in 8 bits.
nlohmann::json to_json(const ModelSpec& model, TensorPart part, const RecordFormat& shared) {
  nlohmann::json units = nlohmann::json::array();
  for (const UnitSpec& unit : model.units) {
    if (!unit.stored()) continue;
    nlohmann::json params = nlohmann::json::array();
    for (const ParamSpec& param : unit.params) {
      params.push_back({{"name", param.name}, {"shape", param.shape}, {"decay", param.decay}});
      if (param.constant) params.back()["constant"] = true;
      // The order of parameters that do not share a unit is that of their units.
      if (param.lent && unit.params.size() > 1) params.back()["number"] = *param.lent;
      if (part.ranks == 1 || param.tp_dim < 0) continue;
      params.back()["tp_dim"] = param.tp_dim;
      params.back()["tp_sections"] = param.tp_sections;
    }
    units.push_back({{"name", unit.name}, {"params", params}});
    const DType dtype = unit.dtype.value_or(model.dtype);
    if (dtype != model.dtype) units.back()["param"] = param_text(dtype);
    if (unit.own_blocks) units.back()["record"] = shared.text();
  }
  return units;
}

constexpr const char* kPlace = "the store's layout";
constexpr const char* kPieces = "pieces";

/// Parses and checks a layout. Stores made before there was a choice of optimizer and format do not
/// name them, so this adds the names that such stores imply.
nlohmann::json parsed(const std::string& layout) {
  nlohmann::json json = parse_strict(layout, kPlace);
  if (json.is_object()) {
    json.emplace("optimizer", to_string(OptimizerKind::kAdamW));
    json.emplace("state_format", to_string(StateFormat::kFp32));
  }
  const JsonField top(json, kPlace);
  for (const char* key : {"model", "optimizer", "state_format", "param"})
    static_cast<void>(top.at(key).text());
  if (top.at("chunk_tiles_max").number() == 0)
    top.refuse("chunk_tiles_max is 0, so chunks would have no tiles");
  for (const char* key : {"ranks", "tensor_parallel", "shard_group", "slices_held"})
    if (top.has(key)) static_cast<void>(top.at(key).number(kRanksMax));
  return json;
}

DType dtype_in(const nlohmann::json& layout) {
  const auto text = layout["param"].get<std::string>();
  const std::optional<DType> dtype = parse_dtype(text.substr(0, text.find(',')));
  if (!dtype || param_text(*dtype) != text) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the store's parameters have the type '{}', which this program does "
                            "not know; the known types are {}",
                            text, fmt::join(kDTypeNames, ", ")));
  }
  return *dtype;
}

StateKind state_in(const nlohmann::json& layout) {
  const auto optimizer = parse_optimizer(layout["optimizer"].get<std::string>());
  const auto format = parse_state_format(layout["state_format"].get<std::string>());
  if (!optimizer || !format) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("this program does not know the store's {} {}: open the store with the "
                            "version of the program that made it",
                            optimizer ? "state format" : "optimizer",
                            layout[optimizer ? "state_format" : "optimizer"].dump()));
  }
  return {*optimizer, *format};
}

/// Returns the roundings in a layout. Layouts of stores that round nothing with noise do not name
/// them, nor do those that were made before layouts had them.
std::optional<Roundings> rounding_in(const nlohmann::json& layout) {
  const JsonField top(layout, kPlace);
  if (!top.has("rounding")) return std::nullopt;
  const JsonField its = top.at("rounding");
  const auto word = [&](const char* key) {
    const JsonField field = its.at(key);
    const std::optional<Rounding> rounding = parse_rounding(field.text());
    if (!rounding)
      field.refuse(fmt::format("this program does not know the rounding '{}'", field.text()));
    return *rounding;
  };
  return Roundings{.state = word("state"), .params = word("params")};
}

Sharding sharding_in(const nlohmann::json& layout) {
  const int ranks = layout.value("ranks", 1);
  const int parts = layout.value("tensor_parallel", 1);
  const int data = parts < 1 ? 0 : ranks / parts;
  const int group = layout.value("shard_group", data);
  const int held = layout.value("slices_held", 1);
  if (data < 1 || ranks % parts != 0 || group < 1 || data % group != 0 ||
      (held != 1 && held != group)) {
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format("the store's layout is impossible: {} ranks in groups of {} divide the layers, "
                    "{} ranks share one copy of the state, and each rank holds {} slices of it",
                    ranks, parts, group, held));
  }
  Sharding sharding = Sharding::of(held > 1 ? 0 : 3, 0, data, group == data ? 0 : group);
  sharding.tensor.ranks = parts;
  return sharding;
}

/// Refuses a run unless it has as many ranks as the store of `layout` was made by, and each rank
/// holds as much of the state.
void require_sharding(const nlohmann::json& layout, const Sharding& sharding) {
  const int ranks = layout.value("ranks", 1);
  const int parts = layout.value("tensor_parallel", 1);
  if (ranks != sharding.ranks() || parts != sharding.tensor.ranks) {
    const auto flags = [](int nproc, int tp) {
      return fmt::format("`nproc={}`{}", nproc, tp > 1 ? fmt::format(" `tp={}`", tp) : "");
    };
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the store was made by {} rank{}{}, but this run has {}{}: give {}, "
                    "`resume=reshard` to divide it again among this run's ranks, another `store`, "
                    "or `resume=never` to replace it",
                    ranks, ranks == 1 ? "" : "s",
                    parts > 1 ? fmt::format(" of which each {} divide the layers", parts) : "",
                    flags(sharding.ranks(), sharding.tensor.ranks),
                    parts > 1 && sharding.tensor.ranks == 1 ? " and no `tp`" : "",
                    flags(ranks, parts)));
  }
  if (const int group = layout.value("shard_group", ranks / parts); group != sharding.world_size) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "the store was made with {0} ranks for each copy of the state, but this run has {1}: "
            "give `strategy=hybrid` `shard_group={0}`, or a strategy without groups if the run has "
            "{0} ranks, or `resume=reshard` to divide the state again",
            group, sharding.world_size));
  }
  const bool whole = layout.value("slices_held", 1) > 1;
  const char* const kept = whole ? "0" : "1, 2 or 3";
  if (whole != (!sharding.one_rank() && !sharding.optimizer_sharded())) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the store was made with `zero_stage={}`, but this run has {}. In "
                            "stage 0 every rank has the whole state, in stages 1 to 3 a slice of "
                            "it: give `zero_stage={}`, `resume=reshard` to divide the state again, "
                            "another `store`, or `resume=never` to replace it",
                            kept, sharding.stage, kept));
  }
}

/// Returns `model` with those parameters marked as constant that `layout` names.
ModelSpec with_constants(ModelSpec model, const std::string& layout) {
  const std::vector<std::string> constant = ChunkTable::constant_params(layout);
  const std::set<std::string> names(constant.begin(), constant.end());
  for (UnitSpec& unit : model.units) {
    for (ParamSpec& param : unit.params) {
      if (!param.stored()) continue;
      param.constant = names.contains(param.name);
      if (!param.constant || param.frozen) continue;
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("parameter '{}' was frozen when the store was made, so the store has no "
                      "optimizer state for it, but this run would train it: freeze it with "
                      "`param_groups`, or export the model and begin a new store with it",
                      param.name));
    }
  }
  return model;
}

ParamSpec param_in(const JsonField& field) {
  ParamSpec param{.name = field.at("name").text(),
                  .shape = field.at("shape").numbers(),
                  .decay = field.at("decay").truth()};
  param.constant = param.frozen = field.has("constant") && field.at("constant").truth();
  if (field.has("number")) param.lent = static_cast<ParamId>(field.at("number").number(UINT_MAX));
  if (field.has("tp_dim")) param.tp_dim = static_cast<int>(field.at("tp_dim").number(INT_MAX));
  if (field.has("tp_sections"))
    param.tp_sections = static_cast<int>(field.at("tp_sections").number(INT_MAX));
  bool sound = param.tp_dim < std::ssize(param.shape) && param.tp_sections > 0;
  std::int64_t count = 1;
  for (const std::int64_t dimension : param.shape) {
    sound = sound && dimension > 0 && dimension <= kElementsMax / count;
    if (sound) count *= dimension;
  }
  if (!sound) field.refuse("a parameter cannot have this shape, tp_dim or tp_sections");
  return param;
}

/// Returns whether the parameters of a unit have blocks of codes of their own.
bool has_own_blocks(const JsonField& unit, const nlohmann::json& layout) {
  if (!unit.has("record")) return false;
  const JsonField record = unit.at("record");
  StateKind state = state_in(layout);
  state.own_blocks = true;
  if (!has_codes(state.format) || record.text() != record_format(state).text())
    record.refuse("this program does not know such records");
  if (unit.at("params").size() < 2) unit.refuse("nothing shares the records of this unit");
  return true;
}

/// Returns the model that each rank of the store holds, as a trainer would have described it.
ModelSpec model_in(const nlohmann::json& layout) {
  const JsonField top(layout, kPlace);
  ModelSpec model{.name = top.at("model").text(), .units = {}};
  const JsonField units = top.at("units");
  if (units.size() == 0) units.refuse("the layout has no units");
  for (std::size_t u = 0; u < units.size(); ++u) {
    const JsonField unit = units.at(u);
    UnitSpec& its =
        model.units.emplace_back(UnitSpec{.name = unit.at("name").text(), .params = {}});
    const JsonField params = unit.at("params");
    for (std::size_t p = 0; p < params.size(); ++p) its.params.push_back(param_in(params.at(p)));
    std::uint64_t count = 0;
    for (const ParamSpec& param : its.params) {
      count += param.count();
      if (count > static_cast<std::uint64_t>(kElementsMax))
        unit.refuse(fmt::format("the unit has more than {} elements", kElementsMax));
    }
    if (count == 0) unit.refuse("the unit has no parameters");
    its.own_blocks = has_own_blocks(unit, layout);
    if (!unit.has("param")) continue;
    const std::string text = unit.at("param").text();
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (text == param_text(dtype)) its.dtype = dtype;
    }
    if (!its.dtype) {
      unit.refuse(
          fmt::format("its parameters have the type '{}', which this program does not know", text));
    }
  }
  return model;
}

/// Returns " label: a, b, and 3 more;", or an empty text if there are no names.
std::string listed(std::string_view label, const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  if (names.empty()) return "";
  const std::size_t shown = std::min(names.size(), kShown);
  std::string text = fmt::format(" {}: {}", label, fmt::join(std::span(names).first(shown), ", "));
  if (names.size() > shown) text += fmt::format(", and {} more", names.size() - shown);
  return text + ";";
}

/// Says in words how two models differ.
std::string differences(const ModelSpec& stored, const ModelSpec& own) {
  using Shapes = std::map<std::string, std::vector<std::int64_t>>;
  const auto shapes_of = [](const ModelSpec& model) {
    Shapes shapes;
    for (const UnitSpec& unit : model.units)
      for (const ParamSpec& param : unit.params) shapes[param.name] = param.shape;
    return shapes;
  };
  const Shapes there = shapes_of(stored);
  const Shapes here = shapes_of(own);
  std::vector<std::string> missing_there, missing_here, other_shapes;
  for (const auto& [name, shape] : here) {
    const auto found = there.find(name);
    if (found == there.end()) {
      missing_there.push_back(name);
    } else if (found->second != shape) {
      other_shapes.push_back(
          fmt::format("{} is {} in this program, but {} in the store", name, shape, found->second));
    }
  }
  for (const auto& its : there)
    if (!here.contains(its.first)) missing_here.push_back(its.first);
  std::string text = listed("the store lacks", missing_there) +
                     listed("this program lacks", missing_here) +
                     listed("other shapes", other_shapes);
  if (text.empty()) return "their parameters differ in order, in type or in which of them decay";
  text.pop_back();
  return text.substr(1);
}

}  // namespace

std::string ChunkTable::layout() const {
  nlohmann::json layout = {{"model", model_.name},
                           {"units", to_json(model_, sharding_.tensor, shared_format_)},
                           {"tile_elements", kTileElements},
                           {"chunk_tiles_max", chunk_tiles_max_},
                           {"optimizer", to_string(state_.optimizer)},
                           {"state_format", to_string(state_.format)},
                           {"record", record_format_.text()},
                           {"param", param_text(model_.dtype)}};
  if (rounding_) {
    layout["rounding"] = {{"state", to_string(rounding_->state)},
                          {"params", to_string(rounding_->params)}};
  }
  if (sharding_.ranks() > 1) {  // layouts of one rank do not name ranks
    layout["ranks"] = sharding_.ranks();
    if (sharding_.tensor.ranks > 1) layout["tensor_parallel"] = sharding_.tensor.ranks;
    if (sharding_.replicas > 1) layout["shard_group"] = sharding_.world_size;
    layout["slices_held"] = slices_held();
  }
  return layout.dump();
}

std::string ChunkTable::model_name(const std::string& layout) {
  return parsed(layout)["model"].get<std::string>();
}

DType ChunkTable::param_dtype(const std::string& layout) { return dtype_in(parsed(layout)); }

std::vector<std::string> ChunkTable::constant_params(const std::string& layout) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : model_in(parsed(layout)).units) {
    for (const ParamSpec& param : unit.params) {
      if (param.constant) names.push_back(param.name);
    }
  }
  return names;
}

StateKind ChunkTable::state_of(const std::string& layout) { return state_in(parsed(layout)); }

Sharding ChunkTable::sharding_of(const std::string& layout) { return sharding_in(parsed(layout)); }

ChunkTable ChunkTable::from_layout(const ModelSpec& model, const std::string& layout,
                                   StateKind state, Sharding sharding) {
  nlohmann::json json = parsed(layout);
  const bool divides = json.contains(kPieces) && json[kPieces].is_array();
  json.erase(kPieces);
  const std::string stored_name = model_name(layout);
  if (stored_name != model.name) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the store holds model '{}', not '{}': give that `model`, another `store`, or "
                    "`resume=never` to replace it",
                    stored_name, model.name));
  }
  if (const DType stored_dtype = param_dtype(layout); stored_dtype != model.dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the store's parameters are {0}, but this run's are {1}: give "
                            "`dtype={0}`, another `store`, or `resume=never` to replace it",
                            to_string(stored_dtype), to_string(model.dtype)));
  }
  const StateKind stored = state_of(layout);
  if (stored != state) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the store's state is {}, but this run's is {}: give `optimizer={}` "
                            "`state_format={}`, `resume=reshard` to convert a state of the same "
                            "optimizer, another `store`, or `resume=never` to replace it",
                            to_string(stored), to_string(state), to_string(stored.optimizer),
                            to_string(stored.format)));
  }
  require_sharding(json, sharding);
  ChunkTable table(with_constants(model, layout), json.value("chunk_tiles_max", std::uint64_t{1}),
                   state, sharding, rounding_in(json));
  if (table.layout() != json.dump()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "the store's model '{}' has other parameters or formats than this program's ({}): give "
            "the parameters that the store was made with, in their order, {}or another `store`",
            model.name, differences(model_in(json), model),
            divides ? "`resume=reshard` if they are other parts of the same tensors, " : ""));
  }
  return table;
}

ChunkTable ChunkTable::of_layout(const std::string& layout, int rank) {
  const nlohmann::json json = parsed(layout);
  Sharding its = sharding_in(json);
  const int data = rank / its.tensor.ranks;
  its.rank = data % its.world_size;
  its.tensor.rank = rank % its.tensor.ranks;
  ModelSpec model = model_in(json);
  model.dtype = dtype_in(json);
  const auto chunk_tiles_max = json["chunk_tiles_max"].get<std::uint64_t>();
  return {model, chunk_tiles_max, state_in(json), its, rounding_in(json)};
}

ModelSpec packed_as(const ModelSpec& lent, const std::string& layout) {
  const nlohmann::json json = parsed(layout);
  const ModelSpec stored = model_in(json);
  const std::vector<UnitSpec> order = unpacked_model(stored).units;
  const auto same = [](const UnitSpec& own, const UnitSpec& other) {
    return own.params.front().name == other.params.front().name;
  };
  const auto first_alone = std::ranges::find_if_not(lent.units, &UnitSpec::stored);
  const std::span<const UnitSpec> stored_units(lent.units.begin(), first_alone);
  if (!std::ranges::equal(stored_units, order, same)) return lent;
  std::map<std::string, const UnitSpec*> by_name;
  for (const UnitSpec& unit : lent.units) by_name[unit.params.front().name] = &unit;
  ModelSpec model{.name = lent.name, .units = {}, .dtype = lent.dtype};
  for (const UnitSpec& unit : stored.units) {
    const bool in_blocks = has_codes(state_in(json).format);
    if (unit.params.size() > 1 && in_blocks && !unit.own_blocks) {
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("{}: the parameters of unit '{}' share blocks of 8-bit codes", kPlace,
                              unit.name));
    }
    UnitSpec& its = model.units.emplace_back(UnitSpec{.name = unit.name, .params = {}});
    its.own_blocks = unit.own_blocks;
    for (const ParamSpec& param : unit.params) {
      const UnitSpec& own = *by_name.at(param.name);
      const DType dtype = own.dtype.value_or(lent.dtype);
      if (its.dtype.value_or(dtype) != dtype) return lent;
      its.dtype = dtype;
      its.optional = own.optional;
      its.params.push_back(own.params.front());
    }
  }
  add_packed(model, {first_alone, lent.units.end()}, std::nullopt);
  return model;
}

std::string layout_of_pieces(const std::string& layout) {
  nlohmann::json json = parsed(layout);
  json[kPieces] = true;
  return json.dump();
}

/// Returns true for a layout that layout_of_pieces() marked, and for the unmarked ones that the C
/// interface made earlier: their model has the name below, and each parameter is a unit.
bool is_of_pieces(const std::string& layout) {
  const nlohmann::json json = parsed(layout);
  if (json.contains(kPieces)) return true;
  const std::vector<UnitSpec> units = model_in(json).units;
  return json["model"] == "embedded" && std::ranges::all_of(units, [](const UnitSpec& unit) {
           return unit.params.size() == 1 && unit.params[0].name == unit.name;
         });
}

void require_records(const std::string& layout, StoredRecords records) {
  const nlohmann::json json = parsed(layout);
  const Sharding sharding = sharding_in(json);
  const auto chunk_tiles_max = json["chunk_tiles_max"].get<std::uint64_t>();
  const auto held =
      sharding.optimizer_sharded() ? 1 : static_cast<std::uint64_t>(sharding.world_size);
  std::uint64_t chunks = 0;
  std::uint64_t tiles = 0;
  for (const UnitSpec& unit : model_in(json).units) {
    const std::uint64_t its =
        slice_elements(param_begins(unit).back(), sharding.world_size) / kTileElements;
    tiles += its * held;
    chunks += (its / chunk_tiles_max + (its % chunk_tiles_max != 0 ? 1 : 0)) * held;
    // A record has at least kTileBytes for each tile of its elements.
    if (chunks <= records.count && tiles <= records.size_bytes / kTileBytes) continue;
    throw Error(
        ErrorCode::kDataLoss,
        fmt::format(
            "{} describes more state than the store's {} records hold, which have {} in all",
            kPlace, records.count, format_bytes(records.size_bytes)));
  }
}

}  // namespace ziggurat
