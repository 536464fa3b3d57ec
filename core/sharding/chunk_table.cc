// SPDX-License-Identifier: Apache-2.0
// core/sharding/chunk_table.cc: cuts units into chunks. chunk_table_layout.cc writes the cut as
// text and reads it back.
#include "core/sharding/chunk_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "core/sharding/packing.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

/// Returns the settings of elements [begin, end) of `unit`, whose parameters begin at `begins`.
/// Elements between and after parameters are padding and do not decay. If noise is drawn by
/// parameters, `part` is the part that this rank has of divided parameters; otherwise it is empty.
std::vector<DecayRun> runs_of(const UnitSpec& unit, std::span<const std::uint64_t> begins,
                              std::uint64_t begin, std::uint64_t end,
                              const std::optional<TensorPart>& part) {
  std::vector<DecayRun> runs;
  const auto append = [&](std::uint64_t from, DecayRun run, const ParamSpec* param) {
    const std::uint64_t offset = from;
    from = std::max(from, begin);
    run.end = std::min<std::uint64_t>(run.end, end);
    if (from >= run.end) return;
    run.begin = from - begin;
    run.end -= begin;
    if (param != nullptr && part) run.place = place_of(*param, *part, from - offset);
    // A step may leave out any of the parameters that a trainer lends.
    const bool alone = unit.params.front().lent.has_value();
    const bool goes_on = !runs.empty() && !alone && !run.place && !runs.back().place &&
                         runs.back().decay == run.decay && runs.back().group == run.group;
    if (goes_on) {
      runs.back().end = run.end;
    } else {
      runs.push_back(run);
    }
  };
  // A unit may have thousands of parameters, but a chunk only a few: skip to its first one.
  auto p = static_cast<std::size_t>(std::ranges::upper_bound(begins, begin) - begins.begin()) - 1;
  for (; p < unit.params.size() && begins[p] < end; ++p) {
    const ParamSpec& param = unit.params[p];
    const std::uint64_t param_end = begins[p] + param.count();
    append(begins[p], {.begin = 0, .end = param_end, .decay = param.decay, .group = param.group},
           &param);
    append(param_end, {.begin = 0, .end = begins[p + 1], .decay = false}, nullptr);
  }
  append(begins.back(), {.begin = 0, .end = end, .decay = false}, nullptr);
  return runs;
}

/// Returns which tiles of a unit hold only constant parameters. If the unit has a constant
/// parameter, tiles of padding alone count as constant too. Empty if no parameter is constant.
std::vector<bool> constant_tiles(const UnitSpec& unit, std::span<const std::uint64_t> begins,
                                 std::uint64_t padded_count) {
  if (std::ranges::none_of(unit.params, &ParamSpec::constant)) return {};
  std::vector<bool> constant(padded_count / kTileElements, true);
  for (std::size_t p = 0; p < unit.params.size(); ++p) {
    if (unit.params[p].constant) continue;
    const std::uint64_t end = begins[p] + unit.params[p].count();
    for (std::uint64_t tile = begins[p] / kTileElements; tile * kTileElements < end; ++tile)
      constant[tile] = false;
  }
  return constant;
}

}  // namespace

ChunkTable::ChunkTable(const ModelSpec& model, std::uint64_t chunk_tiles_max, StateKind state,
                       Sharding sharding, std::optional<Roundings> rounding)
    : model_(model),
      chunk_tiles_max_(chunk_tiles_max),
      state_(state),
      sharding_(sharding),
      rounding_(rounding),
      record_format_(ziggurat::record_format(state)),
      shared_format_(ziggurat::record_format({state.optimizer, state.format, true})),
      constant_format_({{"master fp32", sizeof(float) * kTileElements}}) {
  ZIGGURAT_CHECK(chunk_tiles_max > 0, "chunks of no tiles");
  if (model.units.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("model '{}' has no units: give it at least one", model.name));
  }
  for (const UnitSpec& unit : model.units) {
    ZIGGURAT_CHECK(!unit.stored() || stored_count_ == chunks_.size(),
                   "unit '{}' is stored, and comes after one that is not", unit.name);
    add_unit(unit, chunk_tiles_max);
    if (unit.stored()) stored_count_ = chunks_.size();
    shared_runs_.push_back(sharding.tensor.ranks > 1 ? ziggurat::shared_runs(unit)
                                                     : std::vector<ElementRun>{});
  }
}

void ChunkTable::add_unit(const UnitSpec& unit, std::uint64_t chunk_tiles_max) {
  begins_.push_back(ziggurat::param_begins(unit));
  const std::vector<std::uint64_t>& begins = begins_.back();
  const std::uint64_t count = begins.back();
  if (count == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("unit '{}' of model '{}' has no parameters: give it at least one",
                            unit.name, model_.name));
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
  const std::vector<bool> constant = constant_tiles(unit, begins, padded_count);
  std::set<std::uint64_t> places;  // in a slice, where constant tiles of any slice begin or end
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
  const Drawn drawn = drawn_by(state_.format, rounding_.value_or(Roundings()));
  std::optional<TensorPart> part;
  if (drawn.param || drawn.moments) part = sharding_.tensor;
  for (const Chunk& chunk : std::span(chunks_).subspan(units_.back().first_chunk))
    decay_runs_.push_back(runs_of(unit, begins, chunk.begin, chunk.begin + chunk.count, part));
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

/// Cuts a slice of `tiles` tiles into chunks. A chunk must end at each of `places`.
std::vector<ChunkTable::TileRun> ChunkTable::cut_slice(std::uint64_t tiles,
                                                       std::span<const std::uint64_t> places,
                                                       std::uint64_t chunk_tiles_max) {
  std::vector<TileRun> cut;
  std::uint64_t begin = 0;
  const auto cut_evenly = [&](std::uint64_t end) {
    const std::uint64_t length = end - begin;
    const std::uint64_t pieces = (length + chunk_tiles_max - 1) / chunk_tiles_max;
    // Cut evenly: 433 tiles in 19 chunks give 22 or 23 tiles each, not 18 full chunks and a crumb.
    for (std::uint64_t i = 0; i < pieces; ++i)
      cut.push_back({begin + length * i / pieces, begin + length * (i + 1) / pieces});
    begin = end;
  };
  for (const std::uint64_t place : places) cut_evenly(place);
  cut_evenly(tiles);
  return cut;
}

/// Adds tiles [begin, end) of the newest unit as one more chunk.
void ChunkTable::add_chunk(const UnitSpec& unit, std::uint64_t begin, std::uint64_t end,
                           bool constant) {
  const std::uint64_t count = (end - begin) * kTileElements;
  const RecordFormat& format = format_of(unit, constant);
  chunks_.push_back({.unit = static_cast<UnitId>(units_.size() - 1),
                     .begin = begin * kTileElements,
                     .count = count,
                     .record_size_bytes = unit.stored() ? format.record_bytes(end - begin) : 0,
                     .param_size_bytes = count * size_bytes(unit.dtype.value_or(model_.dtype)),
                     .constant = constant});
  total_record_bytes_ += chunks_.back().record_bytes();
  if (constant) return;
  ++units_.back().updated_count;
  ++updated_count_;
}

std::vector<ParamRun> ChunkTable::param_runs(ChunkId id) const {
  const Chunk& its = chunk(id);
  const std::vector<std::uint64_t>& begins = begins_[its.unit];
  const std::vector<ParamSpec>& params = model_.units[its.unit].params;
  const std::uint64_t end = its.begin + its.count;
  std::vector<ParamRun> runs;
  auto p = static_cast<std::size_t>(std::ranges::upper_bound(begins, its.begin) - begins.begin());
  for (p -= 1; p < params.size() && begins[p] < end; ++p) {
    const std::uint64_t first = std::max(begins[p], its.begin);
    const std::uint64_t last = std::min(begins[p] + params[p].count(), end);
    if (first >= last) continue;
    runs.push_back({.param = p,
                    .lent = params[p].lent.value_or(0),
                    .begin = first - its.begin,
                    .first = first - begins[p],
                    .count = last - first});
  }
  return runs;
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

std::uint64_t ChunkTable::largest_param_bytes() const noexcept {
  std::uint64_t largest = 0;
  for (const Chunk& chunk : chunks_) largest = std::max(largest, chunk.param_bytes());
  return largest;
}

std::vector<bool> ChunkTable::constant_chunks() const {
  std::vector<bool> constant;
  if (updated_count_ == stored_count_) return constant;
  for (const Chunk& chunk : stored_chunks()) constant.push_back(chunk.constant);
  return constant;
}

std::vector<std::uint64_t> ChunkTable::record_bytes() const {
  std::vector<std::uint64_t> bytes;
  bytes.reserve(stored_count_);
  for (const Chunk& chunk : stored_chunks()) bytes.push_back(chunk.record_bytes());
  return bytes;
}

}  // namespace ziggurat
