// SPDX-License-Identifier: Apache-2.0
// core/sharding/shard.h: which part of a unit a data-parallel rank holds, by ZeRO stage
// (Rajbhandari et al. 2020, section 5).
//
// A unit is padded so that all ranks have slices of the same length, in whole tiles; slice r
// belongs to rank r. The stage decides which state a rank keeps whole, and of which it keeps only
// its slice:
//
//   stage   parameters   gradients    optimizer state
//   0       whole        whole        whole             every rank makes every update
//   1, 2    whole        slice        slice             updated slices are gathered once a step
//   3       slice        slice        slice             a unit is gathered for each use
//
// Stages 1 and 2 are the same in this engine. A unit's gradient exists whole only in an accumulator
// while the unit is in backward; once a step, when the trainer has finished the gradient, it is
// reduced. No whole gradient is left that stage 1 could keep.
#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "core/sharding/quantization.h"
#include "core/sharding/strategy.h"
#include "core/sharding/tensor_part.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {

/// One rank's place and stage. `rank` and `world_size` count the data-parallel ranks that share one
/// copy of the state: all of them, or one group of the `replicas` groups (HYBRID_SHARD). Where
/// layers are divided, only ranks with the same part of the layers count.
struct Sharding {
  int stage = 0;
  int rank = 0;
  int world_size = 1;
  int replicas = 1;
  /// Number of ranks of a node that share a second partition of parameters between uses (hpZ); 0 if
  /// there is none.
  int node_ranks = 0;
  /// What ranks send in fewer bits, only in stage 3 without replicas; and how many ranks of a node
  /// exchange it first (0: all of them).
  Quantization quantization{};
  int ranks_per_node = 0;
  /// Part of each layer that this rank has.
  TensorPart tensor{};

  /// Returns the sharding of rank `rank` of `total` data-parallel ranks, where every `group` ranks
  /// share a copy of the state; 0 if all ranks share one.
  static constexpr Sharding of(int stage, int rank, int total, int group) noexcept {
    if (group == 0) return {stage, rank, total};
    return {stage, rank % group, group, total / group};
  }
  /// Returns the sharding of data-parallel rank `rank` in a strategy.
  static Sharding of(const Strategy& strategy, int rank) noexcept {
    Sharding its =
        of(strategy.zero_stage, rank, strategy.dp, strategy.is_hybrid() ? strategy.shard_group : 0);
    its.node_ranks = strategy.hpz;
    return its;
  }
  /// Data-parallel ranks.
  int total() const noexcept { return world_size * replicas; }
  NodeGrid nodes() const noexcept {
    return node_grid(world_size, ranks_per_node == 0 ? world_size : ranks_per_node);
  }
  /// Number of ranks of the whole run.
  int ranks() const noexcept { return total() * tensor.ranks; }
  bool one_rank() const noexcept { return world_size == 1; }
  /// Returns true if this rank has records and gradients of only its own slice.
  bool optimizer_sharded() const noexcept { return !one_rank() && stage >= 1; }
  /// Returns true if this rank also keeps only its own slice of parameters between uses.
  bool params_sharded() const noexcept { return !one_rank() && stage == 3; }
};

/// Returns the number of elements of each rank's slice of a unit of `count` elements: whole tiles,
/// padding included.
constexpr std::uint64_t slice_elements(std::uint64_t count, int world_size) noexcept {
  const auto ranks = static_cast<std::uint64_t>(world_size);
  return round_up((count + ranks - 1) / ranks, kTileElements);
}

}  // namespace ziggurat
