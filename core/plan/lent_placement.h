// SPDX-License-Identifier: Apache-2.0
// core/plan/lent_placement.h: chooses where the state of a trainer that lends its memory is kept
// (`placement=auto` of a LentEngine). Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/sharding/model_spec.h"
#include "core/sharding/placement.h"
#include "core/sharding/reduction.h"
#include "optimizer/state_kind.h"

namespace ziggurat {

/// What the choice depends on, on one rank.
struct LentPlacementRequest {
  ModelSpec model;  ///< a unit for each parameter, as LentEngine::open() is given it
  StateKind state{};
  /// The layout of the store that is there, whose units and chunks are used. Errors of the choice
  /// are then those of ChunkTable::from_layout(), too.
  std::optional<std::string> layout{};
  bool continues = false;  ///< the state goes on from such a store, which is divided anew
  bool has_store = false;  ///< there is a directory for what is kept on NVMe
  std::uint64_t durable_every_steps = 1;  ///< EngineConfig::durable_every_steps
  std::uint64_t host_budget_bytes = 0;    ///< 0 if none is given
  std::uint64_t free_bytes = 0;           ///< host memory that nobody uses on this machine
  std::uint64_t node_ranks = 1;           ///< ranks on this machine, which each take as much
  ReductionSettings reduction{};          ///< what is on its way to a GPU
};

struct LentPlacementChoice {
  Placement placement;
  std::string why;                ///< what needs how much, and which memory decided it
  std::uint64_t state_bytes = 0;  ///< host memory that the optimizer's records take
  /// The host budget with which a state on NVMe keeps records in memory, so that a step does not
  /// read them; 0 where that is not worth it, and the least that works well is enough.
  std::uint64_t beside_nvme_bytes = 0;
};

/// Leaves the state of a store that is there on NVMe, where each step is durable. Else keeps in
/// host memory what fits there: within the budget, or else, with the other ranks of the machine, in
/// half of the memory that is free. The other half is for what comes later: gradients, activations,
/// batches, and copies of the state. Records leave host memory before streamed parameters do,
/// because a step reads a record once and a parameter twice. Sums of gradients stay the trainer's.
///
/// Errors: kInvalidArgument if the free memory is too small and there is no store; MemoryExhausted
/// for a budget that is too small.
LentPlacementChoice choose_lent_placement(const LentPlacementRequest& request);

}  // namespace ziggurat
