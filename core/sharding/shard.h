// SPDX-License-Identifier: Apache-2.0
// core/sharding/shard.h: which part of a unit a data-parallel rank holds, by ZeRO stage
// (Rajbhandari et al. 2020, section 5).
//
// A unit is padded so that every rank's slice is as long as any other's, in whole tiles; slice r is
// rank r's. The stage says of what a rank keeps only its slice:
//
//   stage   parameters   gradients    optimizer state
//   0       whole        whole        whole             every rank makes every update
//   1, 2    whole        slice        slice             updated slices are gathered once a step
//   3       slice        slice        slice             a unit is gathered for each use
//
// Stages 1 and 2 are one here: a unit's gradient exists whole only in the accumulator of the unit
// that is in backward, and is reduced when the trainer has finished it, once a step. There is no
// whole gradient to keep.
#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "core/sharding/quantization.h"
#include "core/sharding/strategy.h"
#include "core/sharding/tensor_part.h"
#include "tiers/record_hash.h"

namespace ziggurat {

/// One rank's. `rank` and `world_size` are those of the data-parallel ranks that share one copy of
/// the state: all of them, or a group in each of `replicas` copies (HYBRID_SHARD). Where layers are
/// divided, all of this is among the ranks that have the same part of them.
struct Sharding {
  int stage = 0;
  int rank = 0;
  int world_size = 1;
  int replicas = 1;
  /// Ranks of a node that have a second partition of parameters between uses (hpZ); 0: none.
  int node_ranks = 0;
  /// Stage 3 without replicas: what travels in fewer bits, and the ranks of a node by which it does
  /// (0: all).
  Quantization quantization{};
  int ranks_per_node = 0;
  /// The part of each layer that this rank has.
  TensorPart tensor{};

  /// Rank `rank` of `total` data-parallel ranks, of which every `group` share a copy; 0: all do.
  static constexpr Sharding of(int stage, int rank, int total, int group) noexcept {
    if (group == 0) return {stage, rank, total};
    return {stage, rank % group, group, total / group};
  }
  /// Data-parallel rank `rank`, by a strategy.
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
  /// All ranks of the run.
  int ranks() const noexcept { return total() * tensor.ranks; }
  bool one_rank() const noexcept { return world_size == 1; }
  /// Records and gradients are of this rank's slice only.
  bool optimizer_sharded() const noexcept { return !one_rank() && stage >= 1; }
  /// Parameters, between uses, too.
  bool params_sharded() const noexcept { return !one_rank() && stage == 3; }
};

/// Elements of each rank's slice of a unit of `count` elements: whole tiles, padding included.
constexpr std::uint64_t slice_elements(std::uint64_t count, int world_size) noexcept {
  const auto ranks = static_cast<std::uint64_t>(world_size);
  return round_up((count + ranks - 1) / ranks, kTileElements);
}

}  // namespace ziggurat
