// SPDX-License-Identifier: Apache-2.0
// integrations/cli/stored_run.h: a store opened for its weights, the model and the number of ranks
// known from the store itself.
//
// A store of several ranks is opened by as many, which the command starts here unless a launcher
// has started it: each reads its own file, and rank 0 speaks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "collectives/mesh.h"
#include "core/checkpoint/whole_model.h"
#include "core/engine/engine.h"
#include "core/engine/runtime.h"
#include "core/plan/run_plan.h"
#include "integrations/cli/console.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/train_ranks.h"
#include "tiers/host_device.h"

namespace ziggurat::cli {

struct StoredRun {
  /// No device budget: what the engine itself takes; nothing will be computed. Errors:
  /// kInvalidArgument if there is no store, or one of another trainer; and Engine::open()'s. Never
  /// makes a store.
  static StoredRun open(const std::string& directory, Budgets budgets, Console& console);

  /// Its fp32 masters, whichever rank has them.
  WholeModel masters();
  /// No rank needs another any more.
  void part();

  RunIdentity identity;
  ModelSpec spec;  ///< of the whole model
  WholeModel::Layout layout;
  Place place;  ///< of this rank, among those that the store has
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<TrainRanks> ranks;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Engine> engine;
};

}  // namespace ziggurat::cli
