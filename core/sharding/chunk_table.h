// SPDX-License-Identifier: Apache-2.0
// core/sharding/chunk_table.h: how a model's flat units are cut into chunks, the quantum of
// optimizer work and NVMe I/O.
//
// A unit is padded to whole tiles (tiers/store/record_hash.h) and cut into chunks of nearly equal
// size. A chunk never spans two units, so a unit is ready when its chunks are. The padding is zero
// and stays zero. The cut is fixed when a store is created.
//
// If several ranks divide the state (shard.h), a unit is padded to one equal slice for each of
// them. All slices are cut at the same places, so that a chunk lies within one slice. The table has
// the chunks that this rank updates.
//
//   unit of 40,000 elements, chunks of at most 2 tiles:  3 tiles -> chunks of 2 and 1 tiles, the
//   last 9,152 elements padding
//
// Where parameters share 8-bit records there are gaps between them too (packing.h), which are never
// updated.
//
// Parameters that are frozen when a store is made are *constant*: the store keeps their masters
// once and nothing else of them. A chunk ends where constant tiles begin or end, so that a whole
// chunk is constant or is not. A tile with both kinds of parameters is not constant. A chunk ends
// at such a place of any slice in all slices, so that they are still cut alike.
//
// Units that are not stored (ParamSpec::stored) come last. Their chunks are constant and have no
// record, and neither the layout nor the store knows of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/sharding/model_spec.h"
#include "core/sharding/shard.h"
#include "core/sharding/tensor_part.h"
#include "optimizer/state_format.h"
#include "optimizer/update.h"
#include "tiers/store/state_store.h"

namespace ziggurat {

struct Chunk {
  UnitId unit;
  std::uint64_t begin;              ///< first element in the unit's flat parameters
  std::uint64_t count;              ///< elements of whole tiles, padding included
  std::uint64_t record_size_bytes;  ///< bytes of the chunk's record in its record_format()
  std::uint64_t param_size_bytes;   ///< bytes of the chunk's parameters in the unit's type
  bool constant = false;            ///< never updated: its record is made once, of masters only

  std::uint64_t record_bytes() const noexcept { return record_size_bytes; }
  /// Bytes of the chunk's parameters; its gradient has as many.
  std::uint64_t param_bytes() const noexcept { return param_size_bytes; }
};

/// Elements of a chunk that are of one parameter.
struct ParamRun {
  std::size_t param;    ///< number of the parameter in its unit
  ParamId lent;         ///< ParamSpec::lent; 0 if nobody lends the parameter
  std::uint64_t begin;  ///< first element in the chunk
  std::uint64_t first;  ///< first element in the parameter
  std::uint64_t count;
};

struct UnitChunks {
  std::uint64_t count;         ///< elements, with gaps between parameters
  std::uint64_t padded_count;  ///< elements with padding: whole tiles, equal slices
  std::uint64_t slice_count;   ///< elements of each rank's slice
  ChunkId first_chunk;         ///< the first of the unit's chunks that this rank updates
  std::uint32_t chunk_count;
  std::uint32_t updated_count;  ///< how many of the chunk_count chunks are not constant
  std::uint64_t first_tile;     ///< number of the unit's first tile among all tiles of the model
  /// The number that first_tile would have if one rank had the whole model: dividing the model
  /// among data-parallel ranks does not change it.
  std::uint64_t first_tile_alone;
};

class ChunkTable {
 public:
  /// Cuts `model` into chunks of at most `chunk_tiles_max` tiles. Errors: kInvalidArgument for a
  /// model without units or a unit without parameters.
  ChunkTable(const ModelSpec& model, std::uint64_t chunk_tiles_max, StateKind state = {},
             Sharding sharding = {}, std::optional<Roundings> rounding = std::nullopt);
  /// Returns the table with which the store that has `layout` was created. The layout says which
  /// parameters are constant. Each of them must be frozen in `model`, which may have more frozen
  /// ones. Stages 1 to 3 have the same layout. Errors: kInvalidArgument, saying where they differ,
  /// if `model`, `state` or `sharding` is not that of `layout`.
  static ChunkTable from_layout(const ModelSpec& model, const std::string& layout,
                                StateKind state = {}, Sharding sharding = {});
  /// Returns the table of rank `rank` of the store that has `layout`, for the model that the layout
  /// describes. Errors: kDataLoss for a layout that no store can have.
  static ChunkTable of_layout(const std::string& layout, int rank);
  /// Returns canonical JSON: the model's units with names and shapes, the chunk size, the formats,
  /// the number of ranks and, where layers are divided, how. The JSON and a rank's number are
  /// enough to put the model together (tensor_part.h).
  std::string layout() const;
  /// Return ModelSpec::name and ModelSpec::dtype from a layout. Errors: kDataLoss for a text that
  /// is not a layout.
  static std::string model_name(const std::string& layout);
  static DType param_dtype(const std::string& layout);
  /// Returns the names of the parameters that are constant in a layout.
  static std::vector<std::string> constant_params(const std::string& layout);
  /// Returns the kind of state in a layout.
  static StateKind state_of(const std::string& layout);
  /// Returns rank 0's sharding in a layout. Its stage is 0 if each rank holds the whole state, and
  /// otherwise 3, because stages 1 to 3 hold as much. Errors: kDataLoss for impossible numbers.
  static Sharding sharding_of(const std::string& layout);

  std::size_t unit_count() const noexcept { return units_.size(); }
  const UnitChunks& unit(UnitId id) const noexcept { return units_[id]; }
  /// Bytes of a unit's parameters, padding included.
  std::uint64_t unit_param_bytes(UnitId id) const noexcept {
    return units_[id].padded_count * element_bytes(id);
  }
  const Sharding& sharding() const noexcept { return sharding_; }
  /// Number of slices of a unit whose gradients and records this rank has: all, or only its own.
  int slices_held() const noexcept {
    return sharding_.optimizer_sharded() ? 1 : sharding_.world_size;
  }
  /// First element of those of a unit whose parameters this rank keeps between uses; home_count()
  /// is their number.
  std::uint64_t home_begin(UnitId id) const noexcept {
    return sharding_.params_sharded() ? own_begin(id) : 0;
  }
  std::uint64_t home_count(UnitId id) const noexcept {
    return sharding_.params_sharded() ? units_[id].slice_count : units_[id].padded_count;
  }
  /// Bytes of this rank's part of a unit in the second partition (hpZ); 0 if there is none.
  std::uint64_t node_part_bytes(UnitId id) const noexcept {
    if (sharding_.node_ranks == 0) return 0;
    return unit_param_bytes(id) / static_cast<std::uint64_t>(sharding_.node_ranks);
  }
  /// First element of this rank's slice of a unit.
  std::uint64_t own_begin(UnitId id) const noexcept {
    return static_cast<std::uint64_t>(sharding_.rank) * units_[id].slice_count;
  }
  /// Chunks of the first slice of a unit that this rank has; all slices are cut at the same places.
  std::span<const Chunk> slice_chunks(UnitId id) const noexcept {
    const UnitChunks& of = units_[id];
    return std::span(chunks_).subspan(of.first_chunk, of.chunk_count / slices());
  }
  std::span<const Chunk> chunks() const noexcept { return chunks_; }
  /// The chunks that have records, which come first.
  std::span<const Chunk> stored_chunks() const noexcept {
    return std::span(chunks_).first(stored_count_);
  }
  const Chunk& chunk(ChunkId id) const noexcept { return chunks_[id]; }
  /// Number of tiles of the whole model, in the slices of all ranks.
  std::uint64_t tile_count() const noexcept { return tile_count_; }
  std::uint64_t padded_count() const noexcept;
  std::uint64_t largest_unit_padded_count() const noexcept;
  std::uint64_t largest_chunk_count() const noexcept;
  std::uint64_t largest_record_bytes() const noexcept;
  std::uint64_t largest_param_bytes() const noexcept;  ///< of a chunk
  std::uint64_t total_record_bytes() const noexcept { return total_record_bytes_; }
  /// Return of each stored chunk how large its record is, and whether it is constant; the latter
  /// empty if no chunk is.
  std::vector<std::uint64_t> record_bytes() const;
  std::vector<bool> constant_chunks() const;
  const StateKind& state() const noexcept { return state_; }
  /// What the record of a chunk holds, unless the chunk is constant.
  StateKind state(ChunkId id) const noexcept {
    return {state_.optimizer, state_.format, model_.units[chunk(id).unit].own_blocks};
  }
  /// Roundings that the layout records; stochastic rounding is then keyed by parameters. Empty if
  /// it records none, as in stores that were made before layouts had them: the run's own settings
  /// count then, and stochastic rounding is keyed by tiles.
  const std::optional<Roundings>& rounding() const noexcept { return rounding_; }
  /// Record format of every chunk that is neither constant nor of UnitSpec::own_blocks.
  const RecordFormat& record_format() const noexcept { return record_format_; }
  const RecordFormat& record_format(ChunkId id) const noexcept {
    return format_of(model_.units[chunk(id).unit], chunk(id).constant);
  }
  /// Format in which the chunk's record holds its masters.
  StateFormat state_format(ChunkId id) const noexcept {
    return chunk(id).constant ? StateFormat::kFp32 : state_.format;
  }
  /// Number of chunks that every step updates.
  std::size_t updated_count() const noexcept { return updated_count_; }
  /// Returns true if chunk `i` is constant in every slice of the unit, on this rank and on all
  /// others.
  bool constant_everywhere(UnitId id, std::size_t i) const noexcept {
    return constant_cuts_[id].size() > i && constant_cuts_[id][i];
  }
  /// Number of a chunk's elements before the padding at the unit's end.
  std::uint64_t real_count(ChunkId id) const noexcept {
    const std::uint64_t end =
        std::min(chunk(id).begin + chunk(id).count, unit(chunk(id).unit).count);
    return end - std::min(end, chunk(id).begin);
  }
  /// First element of chunk `id`, counted through the model as if one rank had all of it, that
  /// rank's padding included. Noise of tiles is keyed by this number, so that it stays the same
  /// when the state is divided among other ranks.
  std::uint64_t first_element(ChunkId id) const noexcept {
    return unit(chunk(id).unit).first_tile_alone * kTileElements + chunk(id).begin;
  }
  /// Runs of a chunk's elements, padding included. Each says whether its elements decay and which
  /// group's settings they use and, if rounding() draws noise, which place in which parameter they
  /// have.
  std::span<const DecayRun> decay_runs(ChunkId id) const noexcept { return decay_runs_[id]; }
  /// Returns a chunk's elements by parameter, in order, without padding. If a trainer lends them,
  /// decay_runs() has the same runs, and others of what lies between and behind them.
  std::vector<ParamRun> param_runs(ChunkId id) const;
  /// Returns where each of a unit's parameters begins and, as the last value, where the unit ends.
  std::span<const std::uint64_t> param_begins(UnitId id) const noexcept { return begins_[id]; }
  /// Whether gradients, and parameters unless they are streamed, are in memory that the trainer
  /// lends.
  bool is_lent() const noexcept { return model_.units.front().params.front().lent.has_value(); }
  /// Whether the engine keeps the unit's parameters: they are not in memory that the trainer lends.
  bool has_home(UnitId id) const noexcept {
    return !is_lent() || std::ranges::any_of(model_.units[id].params, [](const ParamSpec& param) {
      return param.streamed.has_value();
    });
  }
  /// Whether several parameters that a trainer lends share the unit, so that its elements do not
  /// lie together in memory.
  bool is_packed(UnitId id) const noexcept {
    const std::vector<ParamSpec>& params = model_.units[id].params;
    return params.size() > 1 && params.front().lent.has_value();
  }
  /// Runs of a unit's elements, in order, that tensor-parallel ranks do not divide, so that every
  /// part has them whole. Empty if layers are not divided.
  std::span<const ElementRun> shared_runs(UnitId id) const noexcept { return shared_runs_[id]; }
  const ModelSpec& model() const noexcept { return model_; }
  /// Return the type of the parameters of a unit, or of a chunk.
  DType dtype(UnitId id) const noexcept { return model_.units[id].dtype.value_or(model_.dtype); }
  DType chunk_dtype(ChunkId id) const noexcept { return dtype(chunk(id).unit); }
  std::size_t element_bytes(UnitId id) const noexcept { return size_bytes(dtype(id)); }

 private:
  /// Tiles [begin, end) of every slice, counted from where the slice begins.
  struct TileRun {
    std::uint64_t begin;
    std::uint64_t end;
  };
  void add_unit(const UnitSpec& unit, std::uint64_t chunk_tiles_max);
  void add_chunk(const UnitSpec& unit, std::uint64_t begin, std::uint64_t end, bool constant);
  static std::vector<TileRun> cut_slice(std::uint64_t tiles, std::span<const std::uint64_t> places,
                                        std::uint64_t chunk_tiles_max);
  std::uint32_t slices() const noexcept { return static_cast<std::uint32_t>(slices_held()); }
  const RecordFormat& format_of(const UnitSpec& unit, bool constant) const noexcept {
    if (constant) return constant_format_;
    return unit.own_blocks ? shared_format_ : record_format_;
  }

  ModelSpec model_;
  std::uint64_t chunk_tiles_max_;
  StateKind state_;
  Sharding sharding_;
  std::optional<Roundings> rounding_;
  RecordFormat record_format_;
  RecordFormat shared_format_;  // of UnitSpec::own_blocks
  RecordFormat constant_format_;
  std::vector<UnitChunks> units_;
  std::vector<std::vector<std::uint64_t>> begins_;  // per unit, as param_begins()
  std::vector<Chunk> chunks_;
  std::vector<std::vector<DecayRun>> decay_runs_;
  std::vector<std::vector<ElementRun>> shared_runs_;
  std::vector<std::vector<bool>> constant_cuts_;  ///< per unit: what constant_everywhere() returns;
                                                  ///< empty if no tile is constant
  std::size_t stored_count_ = 0;
  std::size_t updated_count_ = 0;
  std::uint64_t total_record_bytes_ = 0;
  std::uint64_t tile_count_ = 0;
  std::uint64_t tile_count_alone_ = 0;
};

}  // namespace ziggurat
