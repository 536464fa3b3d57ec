// SPDX-License-Identifier: Apache-2.0
// core/sharding/chunk_table.h: how a model's flat units are cut into chunks, the quantum of
// optimizer work and NVMe I/O.
//
// A unit is padded to whole tiles (tiers/record_hash.h) and cut into chunks of nearly equal size; a
// chunk never spans two units, so a unit is ready when its chunks are. The padding is zero and
// stays zero. Fixed when a store is created.
//
// Among several ranks (shard.h) it is padded to as many equal slices, and each slice is cut alike:
// a chunk lies within one slice. The table has the chunks that this rank updates.
//
//   unit of 40,000 elements, chunks of at most 2 tiles:  3 tiles -> chunks of 2 and 1 tiles, the
//   last 9,152 elements padding
//
// Parameters that are frozen when a store is made are *constant*: it keeps their masters once, and
// nothing else. Chunks end where constant tiles begin and end, so that a chunk is constant or not
// as a whole; a tile that has both kinds of parameters is not. Slices are still cut alike, at the
// places that any of them has.
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
#include "tiers/state_store.h"

namespace ziggurat {

struct Chunk {
  UnitId unit;
  std::uint64_t begin;              ///< first element in the unit's flat parameters
  std::uint64_t count;              ///< elements, whole tiles, padding included
  std::uint64_t record_size_bytes;  ///< of its record, as record_format() of the chunk has it
  std::uint64_t param_size_bytes;   ///< of its parameters in the unit's type
  bool constant = false;            ///< never updated; its record is made once, of masters only

  std::uint64_t record_bytes() const noexcept { return record_size_bytes; }
  /// The chunk's parameters, and as much of gradient.
  std::uint64_t param_bytes() const noexcept { return param_size_bytes; }
};

struct UnitChunks {
  std::uint64_t count;         ///< elements
  std::uint64_t padded_count;  ///< whole tiles, equal slices
  std::uint64_t slice_count;   ///< elements of each rank's slice
  ChunkId first_chunk;         ///< of those that this rank updates
  std::uint32_t chunk_count;
  std::uint32_t updated_count;  ///< of these, those that are not constant
  std::uint64_t first_tile;     ///< of the model's tiles, in order of unit and offset
  /// The same where one rank has the model: a number that no cut among data-parallel ranks moves.
  std::uint64_t first_tile_alone;
};

class ChunkTable {
 public:
  /// Errors: kInvalidArgument for a model without units or a unit without parameters.
  ChunkTable(const ModelSpec& model, std::uint64_t chunk_tiles_max, StateKind state = {},
             Sharding sharding = {}, std::optional<Roundings> rounding = std::nullopt);
  /// The table a store was created with. Errors: kInvalidArgument if `model`, `state` or
  /// `sharding` is not that of `layout`, saying where they differ. Stages 1 to 3 have one layout.
  /// Which parameters are constant, the layout says: each must be frozen in `model`, which may have
  /// others frozen too.
  static ChunkTable from_layout(const ModelSpec& model, const std::string& layout,
                                StateKind state = {}, Sharding sharding = {});
  /// Rank `rank`'s table of such a store, the model being the layout's own. Errors: kDataLoss for a
  /// layout that no store has.
  static ChunkTable of_layout(const std::string& layout, int rank);
  /// Canonical JSON: the model's units, names and shapes, the chunk size, the formats, among how
  /// many ranks, and where layers are divided, how: with this rank's place among `ranks`, enough to
  /// put the model together (tensor_part.h).
  std::string layout() const;
  /// The ModelSpec::name and ModelSpec::dtype in a layout. Errors: kDataLoss for what is none.
  static std::string model_name(const std::string& layout);
  static DType param_dtype(const std::string& layout);
  /// The names of parameters that are constant in a layout.
  static std::vector<std::string> constant_params(const std::string& layout);
  /// The StateKind in a layout.
  static StateKind state_of(const std::string& layout);
  /// Rank 0's; stage 0 or 3, for all stages that hold as much. Errors: kDataLoss for numbers that
  /// make no sense.
  static Sharding sharding_of(const std::string& layout);

  std::size_t unit_count() const noexcept { return units_.size(); }
  const UnitChunks& unit(UnitId id) const noexcept { return units_[id]; }
  /// A unit's parameters, padding included.
  std::uint64_t unit_param_bytes(UnitId id) const noexcept {
    return units_[id].padded_count * size_bytes(dtype(id));
  }
  const Sharding& sharding() const noexcept { return sharding_; }
  /// Slices of a unit whose gradients and records this rank has: all, or its own.
  int slices_held() const noexcept {
    return sharding_.optimizer_sharded() ? 1 : sharding_.world_size;
  }
  /// The elements of a unit whose parameters this rank keeps: [home_begin, home_begin +
  /// home_count).
  std::uint64_t home_begin(UnitId id) const noexcept {
    return sharding_.params_sharded() ? own_begin(id) : 0;
  }
  std::uint64_t home_count(UnitId id) const noexcept {
    return sharding_.params_sharded() ? units_[id].slice_count : units_[id].padded_count;
  }
  /// This rank's part of a unit in the second partition; 0 without one.
  std::uint64_t node_part_bytes(UnitId id) const noexcept {
    if (sharding_.node_ranks == 0) return 0;
    return unit_param_bytes(id) / static_cast<std::uint64_t>(sharding_.node_ranks);
  }
  /// Where this rank's slice of a unit begins.
  std::uint64_t own_begin(UnitId id) const noexcept {
    return static_cast<std::uint64_t>(sharding_.rank) * units_[id].slice_count;
  }
  /// How every slice of a unit is cut: the chunks of the first that this rank has.
  std::span<const Chunk> slice_chunks(UnitId id) const noexcept {
    const UnitChunks& of = units_[id];
    return std::span(chunks_).subspan(of.first_chunk, of.chunk_count / slices());
  }
  std::span<const Chunk> chunks() const noexcept { return chunks_; }
  const Chunk& chunk(ChunkId id) const noexcept { return chunks_[id]; }
  /// Tiles of the whole model, all slices.
  std::uint64_t tile_count() const noexcept { return tile_count_; }
  std::uint64_t padded_count() const noexcept;
  std::uint64_t largest_unit_padded_count() const noexcept;
  std::uint64_t largest_chunk_count() const noexcept;
  std::uint64_t largest_record_bytes() const noexcept;
  std::uint64_t total_record_bytes() const noexcept;
  std::vector<std::uint64_t> record_bytes() const;
  /// Per chunk; empty where none is constant.
  std::vector<bool> constant_chunks() const;
  const StateKind& state() const noexcept { return state_; }
  /// What the layout says of rounding; then stochastic rounding is keyed by parameters. Nothing: it
  /// is the run's, keyed by tiles, as in stores that were made before layouts said so.
  const std::optional<Roundings>& rounding() const noexcept { return rounding_; }
  /// The format of every chunk that is not constant.
  const RecordFormat& record_format() const noexcept { return record_format_; }
  const RecordFormat& record_format(ChunkId id) const noexcept {
    return chunk(id).constant ? constant_format_ : record_format_;
  }
  /// How the chunk's record holds its masters.
  StateFormat state_format(ChunkId id) const noexcept {
    return chunk(id).constant ? StateFormat::kFp32 : state_.format;
  }
  /// Chunks that every step updates.
  std::size_t updated_count() const noexcept { return updated_count_; }
  /// Chunk `i` of every slice of the unit, this rank's and the others', is constant.
  bool constant_everywhere(UnitId id, std::size_t i) const noexcept {
    return constant_cuts_[id].size() > i && constant_cuts_[id][i];
  }
  /// Elements of a chunk that are no padding.
  std::uint64_t real_count(ChunkId id) const noexcept {
    const std::uint64_t end =
        std::min(chunk(id).begin + chunk(id).count, unit(chunk(id).unit).count);
    return end - std::min(end, chunk(id).begin);
  }
  /// Where chunk `id` begins among the model's elements, padding of one rank's counted: what noise
  /// of tiles is keyed by, so that it stays the same when the state is cut anew.
  std::uint64_t first_element(ChunkId id) const noexcept {
    return unit(chunk(id).unit).first_tile_alone * kTileElements + chunk(id).begin;
  }
  /// Which elements of a chunk decay and whose settings they have, and, if rounding() draws noise,
  /// where in which parameter they are; covers the whole chunk, padding too.
  std::span<const DecayRun> decay_runs(ChunkId id) const noexcept { return decay_runs_[id]; }
  /// Where layers are divided among ranks: what of a unit is not, so that every part has it whole;
  /// in order. Empty where nothing is divided.
  std::span<const ElementRun> shared_runs(UnitId id) const noexcept { return shared_runs_[id]; }
  const ModelSpec& model() const noexcept { return model_; }
  DType dtype() const noexcept { return model_.dtype; }
  DType dtype(UnitId id) const noexcept { return model_.units[id].dtype.value_or(model_.dtype); }

 private:
  /// A run of tiles of every slice, counted from its beginning.
  struct TileRun {
    std::uint64_t begin;
    std::uint64_t end;
  };
  void add_unit(const UnitSpec& unit, std::uint64_t chunk_tiles_max);
  void add_chunk(const UnitSpec& unit, std::uint64_t begin, std::uint64_t end, bool constant);
  static std::vector<TileRun> cut_slice(std::uint64_t tiles, std::span<const std::uint64_t> places,
                                        std::uint64_t chunk_tiles_max);
  std::uint32_t slices() const noexcept { return static_cast<std::uint32_t>(slices_held()); }

  ModelSpec model_;
  std::uint64_t chunk_tiles_max_;
  StateKind state_;
  Sharding sharding_;
  std::optional<Roundings> rounding_;
  RecordFormat record_format_;
  RecordFormat constant_format_;
  std::vector<UnitChunks> units_;
  std::vector<Chunk> chunks_;
  std::vector<std::vector<DecayRun>> decay_runs_;
  std::vector<std::vector<ElementRun>> shared_runs_;
  std::vector<std::vector<bool>> constant_cuts_;  ///< per unit: constant_everywhere(); none: empty
  std::size_t updated_count_ = 0;
  std::uint64_t tile_count_ = 0;
  std::uint64_t tile_count_alone_ = 0;
};

}  // namespace ziggurat
