// SPDX-License-Identifier: Apache-2.0
// core/plan/memory.h: the bytes of one rank, by class of state and tier, before anything runs.
//
// Per parameter a rank holds at rest (Rajbhandari et al. 2020, "ZeRO", section 3.1: 2 + 2 + 12 with
// mixed-precision Adam), N being the ranks that a class is cut over (core/sharding/strategy.h):
//
//   parameters     e / N            e: bytes of the model's type
//   secondary      e / P            hpZ only, on the host (Wang et al. 2023, "ZeRO++", section 4.2)
//   gradients      e / N
//   masters        4 / N            2 where the parameter is the master
//   moments        the rest of the record's bytes / N   (optimizer/state_format.h)
//
// What is there only while a step runs depends on the budgets: core/plan/run_plan.h.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/plan/host_plan.h"
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

/// What an element of each class is.
struct Recipe {
  DType dtype = DType::kBFloat16;         ///< parameters, and gradients at rest
  DType reduce_dtype = DType::kBFloat16;  ///< gradients between ranks
  StateKind state{};                      ///< masters and moments
};

enum class StateClass : std::uint8_t {
  kParams,
  kSecondaryParams,  ///< hpZ's
  kGradients,
  kMasters,
  kMoments,
  kSecondSlot,   ///< of records on NVMe, so that every step is durable
  kCheckpoint,   ///< NVMe's room for records that are placed elsewhere
  kStoreTables,  ///< headers, hashes, blobs
  kActivations,  ///< and the trainer's workspace
  kLiveParams,   ///< gathered or loaded for use
  kAccumulator,
  kNormSums,  ///< sums of squares of tiles, of all ranks
  kBucket,
  kQuantizedParams,  ///< between ranks
  kKeptRecords,      ///< that host memory keeps from sweep to sweep
  kWorkItems,        ///< leases of the optimizer's sweep, and of loads from NVMe
  kSaveBuffers,      ///< of checkpoints that are written while training goes on
};
std::string_view to_string(StateClass kind) noexcept;
/// At rest between steps; else it is there while a step runs.
constexpr bool at_rest(StateClass kind) noexcept { return kind <= StateClass::kStoreTables; }

struct MemoryRequest {
  ModelSize model;
  Recipe recipe;
  Strategy strategy;
  Placement placement;
  int slots = 2;  ///< of records on NVMe
  std::uint64_t chunk_tiles_max = kChunkTilesMax;
};

struct MemoryItem {
  StateClass kind;
  Tier tier;
  std::uint64_t size_bytes;
};

struct RankMemory {
  std::vector<MemoryItem> items;    ///< none of 0 bytes
  std::uint64_t padding_bytes = 0;  ///< of the items at rest

  std::uint64_t bytes(StateClass kind) const noexcept;
  std::uint64_t bytes(Tier tier) const noexcept;
  std::uint64_t bytes(StateClass kind, Tier tier) const noexcept;
  void add(StateClass kind, Tier tier, std::uint64_t size_bytes) {
    if (size_bytes > 0) items.push_back({kind, tier, size_bytes});
  }
  /// Parameters, gradients and optimizer state, on whatever tier, one slot: the papers' "model
  /// states".
  std::uint64_t model_state_bytes() const noexcept;
};

/// What is held at rest.
RankMemory rank_memory(const MemoryRequest& request);

/// The papers' formula for model states, without padding (Rajbhandari et al. 2020, figure 1, with K
/// bytes of optimizer state; a hybrid has its group for N):
///
///   stage 0  (2e + K) Psi      1  2e Psi + K Psi / N      2  e Psi + (e + K) Psi / N
///   stage 3  (2e + K) Psi / N, with hpZ e Psi / P more
///
/// In stage 1 it counts whole gradients, which are not kept here.
double published_state_bytes(const ModelSize& model, const Recipe& recipe,
                             const Strategy& strategy) noexcept;

}  // namespace ziggurat
