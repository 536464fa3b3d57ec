// SPDX-License-Identifier: Apache-2.0
// integrations/cli/stored_run.h: a store opened for its weights, the model and the number of ranks
// known from the store itself.
//
// A store of several ranks is opened by as many, which the command starts here unless a launcher
// has started it: each reads its own file, and rank 0 speaks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/engine/engine.h"
#include "core/engine/runtime.h"
#include "integrations/cli/console.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/train_ranks.h"
#include "tiers/host_device.h"

namespace ziggurat::cli {

struct StoredRun {
  struct Budgets {               ///< of each rank
    std::uint64_t device_bytes;  ///< 0: what the engine itself takes; nothing will be computed
    std::uint64_t host_bytes;
  };
  /// Errors: kInvalidArgument if there is no store, or one of another trainer; and
  /// Engine::open()'s. Never makes a store.
  static StoredRun open(const std::string& directory, Budgets budgets, Console& console);

  /// Of rank 0: `unit`'s fp32 masters in element order, whichever rank has them. Every rank calls
  /// it for the same units.
  void read_masters(UnitId unit, const std::function<void(std::span<const float>)>& consume);
  /// No rank needs another any more.
  void part();

  RunIdentity identity;
  ModelSpec spec;
  int slices = 1;  ///< ranks among which each unit lies, 0 first
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<TrainRanks> ranks;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Engine> engine;
};

}  // namespace ziggurat::cli
