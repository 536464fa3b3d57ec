// SPDX-License-Identifier: Apache-2.0
// core/sharding/chunk_table.cc: cutting units into chunks, and writing the cut down.
#include "core/sharding/chunk_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

constexpr std::int64_t kDimensionMax = std::int64_t{1} << 50;

/// The settings of elements [begin, end) of `unit`; what lies behind its parameters is padding and
/// does not decay.
std::vector<DecayRun> runs_of(const UnitSpec& unit, std::uint64_t begin, std::uint64_t end) {
  std::vector<DecayRun> runs;
  const auto append = [&](std::uint64_t from, std::uint64_t to, bool decay, std::uint32_t group) {
    from = std::max(from, begin);
    to = std::min(to, end);
    if (from >= to) return;
    if (!runs.empty() && runs.back().decay == decay && runs.back().group == group) {
      runs.back().end = to - begin;
    } else {
      runs.push_back({from - begin, to - begin, decay, group});
    }
  };
  std::uint64_t offset = 0;
  for (const ParamSpec& param : unit.params) {
    append(offset, offset + param.count(), param.decay, param.group);
    offset += param.count();
  }
  append(offset, end, false, 0);
  return runs;
}

/// Which tiles of a unit have only constant parameters: what only pads a unit that has such
/// parameters is constant too. Empty where no parameter is.
std::vector<bool> constant_tiles(const UnitSpec& unit, std::uint64_t padded_count) {
  if (std::ranges::none_of(unit.params, &ParamSpec::constant)) return {};
  std::vector<bool> constant(padded_count / kTileElements, true);
  std::uint64_t offset = 0;
  for (const ParamSpec& param : unit.params) {
    const std::uint64_t end = offset + param.count();
    for (std::uint64_t tile = offset / kTileElements; !param.constant && tile * kTileElements < end;
         ++tile)
      constant[tile] = false;
    offset = end;
  }
  return constant;
}

/// How masters become parameters; a layout's hash has it in it.
std::string_view param_text(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return "bf16, nearest, ties away";
    case DType::kFloat16: return "fp16, nearest, ties to even";
    case DType::kFloat32: break;
  }
  return "fp32";
}

nlohmann::json to_json(const ModelSpec& model, TensorPart part) {
  nlohmann::json units = nlohmann::json::array();
  for (const UnitSpec& unit : model.units) {
    nlohmann::json params = nlohmann::json::array();
    for (const ParamSpec& param : unit.params) {
      params.push_back({{"name", param.name}, {"shape", param.shape}, {"decay", param.decay}});
      if (param.constant) params.back()["constant"] = true;
      if (part.ranks == 1 || param.tp_dim < 0) continue;
      params.back()["tp_dim"] = param.tp_dim;
      params.back()["tp_sections"] = param.tp_sections;
    }
    units.push_back({{"name", unit.name}, {"params", params}});
    const DType dtype = unit.dtype.value_or(model.dtype);
    if (dtype != model.dtype) units.back()["param"] = param_text(dtype);
  }
  return units;
}

/// Stores made before there was a choice of optimizer and format do not name them.
nlohmann::json parsed(const std::string& layout) {
  auto json = nlohmann::json::parse(layout, nullptr, /*allow_exceptions=*/false);
  if (json.is_object()) {
    json.emplace("optimizer", to_string(OptimizerKind::kAdamW));
    json.emplace("state_format", to_string(StateFormat::kFp32));
    const auto is_text = [&](const char* key) {
      return json.contains(key) && json[key].is_string();
    };
    if (is_text("model") && is_text("optimizer") && is_text("state_format") && is_text("param"))
      return json;
  }
  throw Error(ErrorCode::kDataLoss, "the store's layout is not readable JSON");
}

/// The store of `layout` was made among as many ranks, and each has as much of the state.
void require_sharding(const nlohmann::json& layout, const Sharding& sharding) {
  const int ranks = layout.value("ranks", 1);
  const int parts = layout.value("tensor_parallel", 1);
  if (ranks != sharding.ranks() || parts != sharding.tensor.ranks) {
    const auto flags = [](int nproc, int tp) {
      return fmt::format("`nproc={}`{}", nproc, tp > 1 ? fmt::format(" `tp={}`", tp) : "");
    };
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the store was made by {} rank{}{}, this run has {}{}: give {}, "
                    "`resume=reshard` to cut it anew in its place, another `store`, or "
                    "`resume=never` to replace it",
                    ranks, ranks == 1 ? "" : "s",
                    parts > 1 ? fmt::format(" of which each {} divide the layers", parts) : "",
                    flags(sharding.ranks(), sharding.tensor.ranks),
                    parts > 1 && sharding.tensor.ranks == 1 ? " and no `tp`" : "",
                    flags(ranks, parts)));
  }
  if (const int group = layout.value("shard_group", ranks / parts); group != sharding.world_size) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the store was made with {0} ranks to a copy of the state, this run has "
                    "{1}: give `strategy=hybrid` `shard_group={0}`, or the strategy without "
                    "groups where that is all of them, or `resume=reshard` to cut it anew",
                    group, sharding.world_size));
  }
  const bool whole = layout.value("slices_held", 1) > 1;
  if (whole != (!sharding.one_rank() && !sharding.optimizer_sharded())) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the store was made with `zero_stage={}`, this run has {}: the one has "
                    "the whole state on every rank, the other a slice; give a stage of that "
                    "kind, `resume=reshard` to cut it anew, another `store`, or `resume=never` to "
                    "replace it",
                    whole ? "0" : "1, 2 or 3", sharding.stage));
  }
}

/// `model` with the constant parameters that `layout` names.
ModelSpec with_constants(ModelSpec model, const std::string& layout) {
  const std::vector<std::string> constant = ChunkTable::constant_params(layout);
  const std::set<std::string> names(constant.begin(), constant.end());
  for (UnitSpec& unit : model.units) {
    for (ParamSpec& param : unit.params) {
      param.constant = names.contains(param.name);
      if (!param.constant || param.frozen) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("parameter '{}' was frozen when the store was made, so the store has "
                              "no optimizer state for it, and this run would train it: freeze it "
                              "in param_groups, or export the model and begin a new store with it",
                              param.name));
    }
  }
  return model;
}

}  // namespace

ChunkTable::ChunkTable(const ModelSpec& model, std::uint64_t chunk_tiles_max, StateKind state,
                       Sharding sharding)
    : model_(model),
      chunk_tiles_max_(chunk_tiles_max),
      state_(state),
      sharding_(sharding),
      record_format_(ziggurat::record_format(state)),
      constant_format_({{"master fp32", sizeof(float) * kTileElements}}) {
  ZIGGURAT_CHECK(chunk_tiles_max > 0, "chunks of no tiles");
  if (model.units.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("model '{}' has no units", model.name));
  }
  for (const UnitSpec& unit : model.units) {
    add_unit(unit, chunk_tiles_max);
    shared_runs_.push_back(sharding.tensor.ranks > 1 ? ziggurat::shared_runs(unit)
                                                     : std::vector<ElementRun>{});
  }
}

void ChunkTable::add_unit(const UnitSpec& unit, std::uint64_t chunk_tiles_max) {
  const std::uint64_t count = unit.count();
  if (count == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("unit '{}' of model '{}' has no parameters", unit.name, model_.name));
  }
  const std::uint64_t slice_count = slice_elements(count, sharding_.world_size);
  const std::uint64_t padded_count = slice_count * static_cast<std::uint64_t>(sharding_.world_size);
  units_.push_back({.count = count,
                    .padded_count = padded_count,
                    .slice_count = slice_count,
                    .first_chunk = static_cast<ChunkId>(chunks_.size()),
                    .chunk_count = 0,
                    .updated_count = 0,
                    .first_tile = tile_count_,
                    .first_tile_alone = tile_count_alone_});
  const std::uint64_t slice_tiles = slice_count / kTileElements;
  const std::vector<bool> constant = constant_tiles(unit, padded_count);
  std::set<std::uint64_t> places;  // in a slice, where constant tiles begin or end in any slice
  for (std::size_t tile = 1; tile < constant.size(); ++tile) {
    if (constant[tile] != constant[tile - 1]) places.insert(tile % slice_tiles);
  }
  places.erase(0);
  const std::vector<std::uint64_t> ends(places.begin(), places.end());
  const std::vector<TileRun> cut = cut_slice(slice_tiles, ends, chunk_tiles_max);
  const int first = sharding_.optimizer_sharded() ? sharding_.rank : 0;
  for (int slice = first; slice < first + slices_held(); ++slice) {
    const std::uint64_t begin = static_cast<std::uint64_t>(slice) * slice_tiles;
    for (const TileRun& run : cut) {
      const bool all = !constant.empty() && constant[begin + run.begin];
      add_chunk(unit, begin + run.begin, begin + run.end, all);
    }
  }
  constant_cuts_.emplace_back();
  for (const TileRun& run : constant.empty() ? std::span<const TileRun>() : std::span(cut)) {
    bool everywhere = true;
    for (std::uint64_t tile = run.begin; tile < constant.size(); tile += slice_tiles)
      everywhere = everywhere && constant[tile];
    constant_cuts_.back().push_back(everywhere);
  }
  units_.back().chunk_count =
      static_cast<std::uint32_t>(chunks_.size() - units_.back().first_chunk);
  tile_count_ += padded_count / kTileElements;
  tile_count_alone_ += slice_elements(count, 1) / kTileElements;
}

/// `places`: where chunks must end.
std::vector<ChunkTable::TileRun> ChunkTable::cut_slice(std::uint64_t tiles,
                                                       std::span<const std::uint64_t> places,
                                                       std::uint64_t chunk_tiles_max) {
  std::vector<TileRun> cut;
  std::uint64_t begin = 0;
  const auto cut_evenly = [&](std::uint64_t end) {
    const std::uint64_t length = end - begin;
    const std::uint64_t pieces = (length + chunk_tiles_max - 1) / chunk_tiles_max;
    // Even cut: 433 tiles in 19 chunks are 22 or 23 tiles each, never 18 full ones and a crumb.
    for (std::uint64_t i = 0; i < pieces; ++i)
      cut.push_back({begin + length * i / pieces, begin + length * (i + 1) / pieces});
    begin = end;
  };
  for (const std::uint64_t place : places) cut_evenly(place);
  cut_evenly(tiles);
  return cut;
}

/// Tiles [begin, end) of the newest unit are one chunk more.
void ChunkTable::add_chunk(const UnitSpec& unit, std::uint64_t begin, std::uint64_t end,
                           bool constant) {
  const std::uint64_t count = (end - begin) * kTileElements;
  const RecordFormat& format = constant ? constant_format_ : record_format_;
  chunks_.push_back(
      {.unit = static_cast<UnitId>(units_.size() - 1),
       .begin = begin * kTileElements,
       .count = count,
       .record_size_bytes = format.record_bytes(end - begin),
       .param_size_bytes = count * size_bytes(dtype(static_cast<UnitId>(units_.size() - 1))),
       .constant = constant});
  decay_runs_.push_back(runs_of(unit, begin * kTileElements, end * kTileElements));
  if (constant) return;
  ++units_.back().updated_count;
  ++updated_count_;
}

std::string ChunkTable::layout() const {
  nlohmann::json layout = {{"model", model_.name},
                           {"units", to_json(model_, sharding_.tensor)},
                           {"tile_elements", kTileElements},
                           {"chunk_tiles_max", chunk_tiles_max_},
                           {"optimizer", to_string(state_.optimizer)},
                           {"state_format", to_string(state_.format)},
                           {"record", record_format_.text()},
                           {"param", param_text(model_.dtype)}};
  if (sharding_.ranks() > 1) {  // a store of one rank says nothing of ranks
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

DType ChunkTable::param_dtype(const std::string& layout) {
  const auto text = parsed(layout)["param"].get<std::string>();
  const std::optional<DType> dtype = parse_dtype(text.substr(0, text.find(',')));
  if (!dtype || param_text(*dtype) != text) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the store's parameters are '{}', which is none of {}", text,
                            fmt::join(kDTypeNames, ", ")));
  }
  return *dtype;
}

std::vector<std::string> ChunkTable::constant_params(const std::string& layout) {
  std::vector<std::string> names;
  const nlohmann::json json = parsed(layout);
  for (const nlohmann::json& unit : json.value("units", nlohmann::json::array())) {
    for (const nlohmann::json& param : unit.value("params", nlohmann::json::array())) {
      if (param.value("constant", false)) names.push_back(param.value("name", ""));
    }
  }
  return names;
}

StateKind ChunkTable::state_of(const std::string& layout) {
  const nlohmann::json json = parsed(layout);
  const auto optimizer = parse_optimizer(json["optimizer"].get<std::string>());
  const auto format = parse_state_format(json["state_format"].get<std::string>());
  if (!optimizer || !format) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the store's state is {} in {}, which this program does not know",
                            json["optimizer"].dump(), json["state_format"].dump()));
  }
  return {*optimizer, *format};
}

Sharding ChunkTable::sharding_of(const std::string& layout) {
  const nlohmann::json json = parsed(layout);
  const int ranks = json.value("ranks", 1);
  const int parts = json.value("tensor_parallel", 1);
  const int data = parts < 1 ? 0 : ranks / parts;
  const int group = json.value("shard_group", data);
  const int held = json.value("slices_held", 1);
  if (data < 1 || ranks % parts != 0 || group < 1 || data % group != 0 ||
      (held != 1 && held != group)) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the store says that of {} ranks each {} divide the layers, {} of a "
                            "part share the state, and each has {} slices of it",
                            ranks, parts, group, held));
  }
  Sharding sharding = Sharding::of(held > 1 ? 0 : 3, 0, data, group == data ? 0 : group);
  sharding.tensor.ranks = parts;
  return sharding;
}

ChunkTable ChunkTable::from_layout(const ModelSpec& model, const std::string& layout,
                                   StateKind state, Sharding sharding) {
  const nlohmann::json json = parsed(layout);
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
                fmt::format("the store's parameters are {0}, this run's {1}: give `dtype={0}`, "
                            "another `store`, or `resume=never` to replace it",
                            to_string(stored_dtype), to_string(model.dtype)));
  }
  const StateKind stored = state_of(layout);
  if (stored != state) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the store's state is {}, this run's {}: give `optimizer={}` "
                            "`state_format={}`, `resume=reshard` to convert it (the same "
                            "optimizer's), another `store`, or `resume=never` to replace it",
                            to_string(stored), to_string(state), to_string(stored.optimizer),
                            to_string(stored.format)));
  }
  require_sharding(json, sharding);
  ChunkTable table(with_constants(model, layout), json.value("chunk_tiles_max", std::uint64_t{1}),
                   state, sharding);
  if (table.layout() != json.dump()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the store's model '{}' has other parameters or formats than this program's",
                    model.name));
  }
  return table;
}

namespace {

/// The parts of a rank of the store, as a trainer would have named them.
ModelSpec model_in(const nlohmann::json& json) {
  ModelSpec model{.name = json.at("model").get<std::string>(), .units = {}};
  for (const nlohmann::json& unit : json.at("units")) {
    UnitSpec& its = model.units.emplace_back(
        UnitSpec{.name = unit.at("name").get<std::string>(), .params = {}});
    for (const nlohmann::json& param : unit.at("params")) {
      its.params.push_back({.name = param.at("name").get<std::string>(),
                            .shape = param.at("shape").get<std::vector<std::int64_t>>(),
                            .decay = param.at("decay").get<bool>()});
      ParamSpec& last = its.params.back();
      last.constant = last.frozen = param.value("constant", false);
      last.tp_dim = param.value("tp_dim", -1);
      last.tp_sections = param.value("tp_sections", 1);
      const bool sound = last.tp_dim < std::ssize(last.shape) && last.tp_sections > 0 &&
                         std::ranges::all_of(
                             last.shape, [](std::int64_t d) { return d > 0 && d < kDimensionMax; });
      if (!sound) throw Error(ErrorCode::kDataLoss, "a shape that makes no sense");
    }
    if (!unit.contains("param")) continue;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (unit.at("param") == std::string(param_text(dtype))) its.dtype = dtype;
    }
  }
  return model;
}

}  // namespace

ChunkTable ChunkTable::of_layout(const std::string& layout, int rank) {
  Sharding its = sharding_of(layout);
  const int data = rank / its.tensor.ranks;
  its.rank = data % its.world_size;
  its.tensor.rank = rank % its.tensor.ranks;
  try {
    const nlohmann::json json = parsed(layout);
    ModelSpec model = model_in(json);
    model.dtype = param_dtype(layout);
    return {model, json.at("chunk_tiles_max").get<std::uint64_t>(), state_of(layout), its};
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the store's layout is none that a store has: {}", error.what()));
  }
}

std::uint64_t ChunkTable::padded_count() const noexcept { return tile_count_ * kTileElements; }

std::uint64_t ChunkTable::largest_unit_padded_count() const noexcept {
  std::uint64_t largest = 0;
  for (const UnitChunks& unit : units_) largest = std::max(largest, unit.padded_count);
  return largest;
}

std::uint64_t ChunkTable::largest_chunk_count() const noexcept {
  std::uint64_t largest = 0;
  for (const Chunk& chunk : chunks_) largest = std::max(largest, chunk.count);
  return largest;
}

std::uint64_t ChunkTable::largest_record_bytes() const noexcept {
  std::uint64_t largest = 0;
  for (const Chunk& chunk : chunks_) largest = std::max(largest, chunk.record_bytes());
  return largest;
}

std::uint64_t ChunkTable::total_record_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const Chunk& chunk : chunks_) total += chunk.record_bytes();
  return total;
}

std::vector<bool> ChunkTable::constant_chunks() const {
  std::vector<bool> constant;
  if (updated_count_ == chunks_.size()) return constant;
  for (const Chunk& chunk : chunks_) constant.push_back(chunk.constant);
  return constant;
}

std::vector<std::uint64_t> ChunkTable::record_bytes() const {
  std::vector<std::uint64_t> bytes;
  bytes.reserve(chunks_.size());
  for (const Chunk& chunk : chunks_) bytes.push_back(chunk.record_bytes());
  return bytes;
}

}  // namespace ziggurat
