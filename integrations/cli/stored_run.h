// SPDX-License-Identifier: Apache-2.0
// integrations/cli/stored_run.h: a store opened for its weights, the model known from the store
// itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/engine/engine.h"
#include "core/engine/runtime.h"
#include "integrations/cli/console.h"
#include "integrations/cli/run_state.h"
#include "tiers/host_device.h"

namespace ziggurat::cli {

struct StoredRun {
  struct Budgets {
    std::uint64_t device_bytes;  ///< 0: what the engine itself takes; nothing will be computed
    std::uint64_t host_bytes;
  };
  /// Errors: kInvalidArgument if there is no store, or one of another trainer; and
  /// Engine::open()'s. Never makes a store.
  static StoredRun open(const std::string& directory, Budgets budgets, Console& console);

  RunIdentity identity;
  ModelSpec spec;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Engine> engine;
};

}  // namespace ziggurat::cli
