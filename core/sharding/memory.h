// SPDX-License-Identifier: Apache-2.0
// core/sharding/memory.h: the bytes of one rank, by class of state and tier, before anything runs.
//
// Per parameter of its share a rank holds, at rest (Rajbhandari et al. 2020, "ZeRO", section 3.1:
// 2 + 2 + 12 with mixed-precision Adam), with N the ranks that a class is cut over:
//
//   parameters     e / N            e: bytes of the model's type
//   secondary      e / P            hpZ only (Wang et al. 2023, "ZeRO++", section 4.2)
//   gradients      e / N
//   masters        4 / N            2 where the parameter is the master
//   moments        the rest of the record's bytes / N   (optimizer/state_format.h)
//
// N is 1 or the shard group, by class and stage (core/sharding/strategy.h). So stage 0 has
// (4 + K) Psi, 1 has 4 Psi + K Psi / N, 2 has 2 Psi + (2 + K) Psi / N, 3 has (4 + K) Psi / N for
// K bytes of optimizer state (the same paper, figure 1; K = 12).
// Beside it while a step runs, on the device: the parameters gathered for use, one fp32 accumulator
// of the largest unit, and a bucket of gradients of other ranks that are to be added; on the host,
// what is on its way from and to NVMe.
//
// Pure functions; any thread. Not counted: activations and the trainer's workspace, and what a
// budget is spent on beyond need (kept records, more units in flight).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/sharding/model_spec.h"
#include "core/sharding/placement.h"
#include "core/sharding/strategy.h"
#include "optimizer/state_format.h"

namespace ziggurat {

/// A model as far as bytes depend on it, on one of `tp` tensor-parallel ranks.
struct ModelSize {
  std::uint64_t model_count = 0;  ///< elements of the whole model
  /// Elements of each unit on this rank, in forward order. Empty where only the count is known:
  /// then nothing is padded and what depends on units is left out.
  std::vector<std::uint64_t> units;
  int tp = 1;

  /// Elements on one rank; of a mere count an equal share.
  std::uint64_t rank_count() const noexcept;
};
/// Parameters with a ParamSpec::tp_dim are divided along it, uneven ones rounded up; the rest every
/// rank has whole.
ModelSize model_size(const ModelSpec& model, int tp);
ModelSize model_size(std::uint64_t count, int tp) noexcept;

/// Elements of a unit of `count` padded so that `shards` equal slices of whole tiles make it up.
std::uint64_t padded_to_slices(std::uint64_t count, int shards) noexcept;

/// Tiles in a chunk at most: 6 MiB of fp32 AdamW's record.
inline constexpr std::uint64_t kChunkTilesMax = 32;
/// Work items of the optimizer's sweep that keep a drive and the cores busy; a chunk is the largest
/// that leaves them room.
inline constexpr std::uint64_t kWorkItemsWanted = 12;

/// What an element of each class is.
struct Recipe {
  DType dtype = DType::kBFloat16;         ///< parameters, and gradients at rest
  DType reduce_dtype = DType::kBFloat16;  ///< gradients between ranks
  StateKind state;                        ///< masters and moments
};

enum class StateClass : std::uint8_t {
  kParams,
  kSecondaryParams,  ///< hpZ's
  kGradients,
  kMasters,
  kMoments,
  kSecondSlot,  ///< of records on NVMe, so that every step is durable
  kLiveParams,  ///< gathered or loaded for use
  kAccumulator,
  kBucket,
  kWorkItems,  ///< leases of the optimizer's sweep, and of loads from NVMe
};
std::string_view to_string(StateClass kind) noexcept;
/// At rest between steps; else it is there while a step runs.
constexpr bool at_rest(StateClass kind) noexcept { return kind <= StateClass::kSecondSlot; }

struct MemoryRequest {
  ModelSize model;
  Recipe recipe;
  Strategy strategy;
  Placement placement;
  int slots = 2;  ///< of records on NVMe
  /// Elements of gradients that ranks exchange at once; a bucket never spans two units.
  std::uint64_t reduce_bucket_count = 500'000'000;
  std::uint64_t chunk_tiles_max = kChunkTilesMax;
};

struct MemoryItem {
  StateClass kind;
  Tier tier;
  std::uint64_t size_bytes;
};

struct RankMemory {
  std::vector<MemoryItem> items;    ///< in the order of StateClass; none of 0 bytes
  std::uint64_t padding_bytes = 0;  ///< of the items at rest

  std::uint64_t bytes(StateClass kind) const noexcept;
  std::uint64_t bytes(Tier tier) const noexcept;
  /// Parameters, gradients and optimizer state, on whatever tier, one slot: the papers' "model
  /// states".
  std::uint64_t model_state_bytes() const noexcept;
};

RankMemory rank_memory(const MemoryRequest& request);

/// Units of parameters on the device at once where they are loaded for use: the one in use and
/// those being brought for after it (core/schedule/param_cache.h).
inline constexpr std::size_t kLiveUnits = 3;

}  // namespace ziggurat
