// SPDX-License-Identifier: Apache-2.0
// core/plan/memory.h: predicts the bytes that one rank holds, by class of state and tier, before
// anything runs.
//
// Between steps a rank holds these bytes per parameter (Rajbhandari et al. 2020, "ZeRO", section
// 3.1: 2 + 2 + 12 with mixed-precision Adam). N is the number of ranks over which a class is cut
// (core/sharding/strategy.h):
//
//   parameters     e / N            e: bytes of the model's type
//   secondary      e / P            hpZ only, on the host (Wang et al. 2023, "ZeRO++", section 4.2)
//   gradients      e / N
//   masters        4 / N            2 where the parameter is the master
//   moments        the rest of the record's bytes / N   (optimizer/state_format.h)
//
// Memory that is used only while a step runs depends on the budgets: see core/plan/run_plan.h.
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

/// The sizes of a model that memory depends on, for one of `tp` tensor-parallel ranks.
struct ModelSize {
  std::uint64_t model_count = 0;  ///< elements of the whole model
  /// Elements of each unit on this rank, in forward order. Empty if only the model's count is
  /// known: then nothing is padded, and memory that depends on units is left out.
  std::vector<std::uint64_t> units;
  int tp = 1;

  /// Returns the elements on one rank; an equal share if only the model's count is known.
  std::uint64_t rank_count() const noexcept;
};
/// Computes the sizes for one rank. Parameters with a ParamSpec::tp_dim are divided along that
/// dimension, and uneven parts are rounded up. Every rank has the other parameters whole.
ModelSize model_size(const ModelSpec& model, int tp);
ModelSize model_size(std::uint64_t count, int tp) noexcept;

/// The type of an element of each class.
struct Recipe {
  DType dtype = DType::kBFloat16;         ///< of parameters, and of gradients at rest
  DType reduce_dtype = DType::kBFloat16;  ///< gradients between ranks
  StateKind state{};                      ///< masters and moments
};

enum class StateClass : std::uint8_t {
  kParams,
  kSecondaryParams,  ///< hpZ's
  kGradients,
  kMasters,
  kMoments,
  kSecondSlot,   ///< a second copy of records on NVMe, so that every step is durable
  kCheckpoint,   ///< room on NVMe for records that are placed on another tier
  kStoreTables,  ///< headers, hashes, blobs
  kActivations,  ///< activations and the trainer's workspace
  kLiveParams,   ///< gathered or loaded for use
  kAccumulator,
  kNormSums,  ///< sums of squares of tiles, for all ranks
  kBucket,
  kQuantizedParams,  ///< on their way between ranks
  kKeptRecords,      ///< records that host memory keeps from sweep to sweep
  kWorkItems,        ///< leases for the optimizer's sweep and for loads from NVMe
  kSaveBuffers,      ///< buffers for checkpoints that are written while training goes on
  kGaps,             ///< between tensors, which begin at odd distances
};
std::string_view to_string(StateClass kind) noexcept;
/// Whether the class is held between steps too, not only while a step runs.
constexpr bool at_rest(StateClass kind) noexcept { return kind <= StateClass::kStoreTables; }

struct MemoryRequest {
  ModelSize model;
  Recipe recipe;
  Strategy strategy;
  Placement placement;
  int slots = 2;  ///< copies of each record on NVMe
  std::uint64_t chunk_tiles_max = kChunkTilesMax;
};

struct MemoryItem {
  StateClass kind;
  Tier tier;
  std::uint64_t size_bytes;
};

struct RankMemory {
  std::vector<MemoryItem> items;    ///< without items of 0 bytes
  std::uint64_t padding_bytes = 0;  ///< the part of the items at rest that is padding

  std::uint64_t bytes(StateClass kind) const noexcept;
  std::uint64_t bytes(Tier tier) const noexcept;
  std::uint64_t bytes(StateClass kind, Tier tier) const noexcept;
  void add(StateClass kind, Tier tier, std::uint64_t size_bytes) {
    if (size_bytes > 0) items.push_back({kind, tier, size_bytes});
  }
  /// Returns the bytes of parameters, gradients and optimizer state on all tiers, with one slot:
  /// the "model states" of the papers.
  std::uint64_t model_state_bytes() const noexcept;
};

/// Computes the memory that is held between steps.
RankMemory rank_memory(const MemoryRequest& request);

/// Computes model states with the papers' formula, without padding (Rajbhandari et al. 2020, figure
/// 1). K is the bytes of optimizer state per parameter; for a hybrid, N is the size of its group:
///
///   stage 0  (2e + K) Psi      1  2e Psi + K Psi / N      2  e Psi + (e + K) Psi / N
///   stage 3  (2e + K) Psi / N, with hpZ e Psi / P more
///
/// In stage 1 the formula counts whole gradients, which this engine does not keep.
double published_state_bytes(const ModelSize& model, const Recipe& recipe,
                             const Strategy& strategy) noexcept;

}  // namespace ziggurat
