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
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/sharding/model_spec.h"
#include "core/sharding/shard.h"
#include "optimizer/state_format.h"
#include "optimizer/update.h"
#include "tiers/state_store.h"

namespace ziggurat {

struct Chunk {
  UnitId unit;
  std::uint64_t begin;              ///< first element in the unit's flat parameters
  std::uint64_t count;              ///< elements, whole tiles, padding included
  std::uint64_t record_size_bytes;  ///< of its record, as the table's record format has it
  std::uint64_t param_size_bytes;   ///< of its parameters in the model's type

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
  std::uint64_t first_tile;  ///< of the model's tiles, in order of unit and offset
};

class ChunkTable {
 public:
  /// Errors: kInvalidArgument for a model without units or a unit without parameters.
  ChunkTable(const ModelSpec& model, std::uint64_t chunk_tiles_max, StateKind state = {},
             Sharding sharding = {});
  /// The table a store was created with. Errors: kInvalidArgument if `model`, `state` or
  /// `sharding` is not that of `layout`, saying where they differ. Stages 1 to 3 have one layout.
  static ChunkTable from_layout(const ModelSpec& model, const std::string& layout,
                                StateKind state = {}, Sharding sharding = {});
  /// Canonical JSON: the model's units, names and shapes, the chunk size, the formats, and among
  /// how many ranks.
  std::string layout() const;
  /// The ModelSpec::name and ModelSpec::dtype in a layout. Errors: kDataLoss for what is none.
  static std::string model_name(const std::string& layout);
  static DType param_dtype(const std::string& layout);
  /// The StateKind in a layout.
  static StateKind state_of(const std::string& layout);
  /// Of rank 0; of the stages that hold as much, 0 or 3. Errors: kDataLoss for numbers that make no
  /// sense.
  static Sharding sharding_of(const std::string& layout);

  std::size_t unit_count() const noexcept { return units_.size(); }
  const UnitChunks& unit(UnitId id) const noexcept { return units_[id]; }
  /// A unit's parameters, padding included.
  std::uint64_t unit_param_bytes(UnitId id) const noexcept {
    return units_[id].padded_count * size_bytes(dtype());
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
  /// Of the whole model, all slices.
  std::uint64_t tile_count() const noexcept { return tile_count_; }
  std::uint64_t padded_count() const noexcept;
  std::uint64_t largest_unit_padded_count() const noexcept;
  std::uint64_t largest_chunk_count() const noexcept;
  std::uint64_t largest_record_bytes() const noexcept;
  std::uint64_t total_record_bytes() const noexcept;
  std::vector<std::uint64_t> record_bytes() const;
  const StateKind& state() const noexcept { return state_; }
  const RecordFormat& record_format() const noexcept { return record_format_; }
  /// Elements of a chunk that are no padding.
  std::uint64_t real_count(ChunkId id) const noexcept {
    const std::uint64_t end =
        std::min(chunk(id).begin + chunk(id).count, unit(chunk(id).unit).count);
    return end - std::min(end, chunk(id).begin);
  }
  /// Where chunk `id` begins among the model's elements, padding counted.
  std::uint64_t first_element(ChunkId id) const noexcept {
    return unit(chunk(id).unit).first_tile * kTileElements + chunk(id).begin;
  }
  /// Which elements of a chunk decay and whose settings they have; covers the whole chunk, padding
  /// too.
  std::span<const DecayRun> decay_runs(ChunkId id) const noexcept { return decay_runs_[id]; }
  const ModelSpec& model() const noexcept { return model_; }
  DType dtype() const noexcept { return model_.dtype; }

 private:
  void add_unit(const UnitSpec& unit, std::uint64_t chunk_tiles_max);
  void add_slice(const UnitSpec& unit, std::uint64_t begin, std::uint64_t chunk_tiles_max);
  std::uint32_t slices() const noexcept { return static_cast<std::uint32_t>(slices_held()); }

  ModelSpec model_;
  std::uint64_t chunk_tiles_max_;
  StateKind state_;
  Sharding sharding_;
  RecordFormat record_format_;
  std::vector<UnitChunks> units_;
  std::vector<Chunk> chunks_;
  std::vector<std::vector<DecayRun>> decay_runs_;
  std::uint64_t tile_count_ = 0;
};

}  // namespace ziggurat
