// SPDX-License-Identifier: Apache-2.0
// integrations/cli/stored_run.cc: inspect, then open with what the store says.
#include "integrations/cli/stored_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "integrations/cli/store_paths.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {
namespace {

/// The engine sets one accumulator of the largest unit aside when it opens, padded to whole tiles.
std::uint64_t smallest_device_bytes(const ModelSpec& spec) {
  std::uint64_t largest = 0;
  for (const UnitSpec& unit : spec.units) largest = std::max(largest, unit.count());
  return round_up(largest * sizeof(float), kMiB) + kMiB;
}

}  // namespace

StoredRun StoredRun::open(const std::string& directory, Budgets budgets, Console& console) {
  const std::vector<StoreDirectory> store = parse_store(directory);
  if (!store_exists(store)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--store {}: no store is there; `ziggurat train --store {}` makes one",
                            directory, directory));
  }
  StoredRun run;
  run.runtime = Runtime::create({});
  const StoreInfo info = Engine::inspect(*run.runtime, store);
  run.identity = RunIdentity::parse(info.run_identity);
  run.identity.model.dtype = info.dtype;
  run.spec = gpt::make_spec(run.identity.model);
  const std::uint64_t device_bytes =
      budgets.device_bytes != 0 ? budgets.device_bytes : smallest_device_bytes(run.spec);
  run.device = HostDevice::create(run.runtime->reactor, device_bytes);

  EngineConfig config;
  config.store = store;
  config.host_budget_bytes = budgets.host_bytes;
  config.optimizer.state = info.state;
  config.run_identity = info.run_identity;
  config.numerics_fingerprint = gpt::numerics_fingerprint();
  config.progress = [&console](const char* what, std::uint64_t done, std::uint64_t total) {
    console.progress(what, done, total);
  };
  run.engine = Engine::open(run.spec, config, *run.runtime, *run.device,
                            gpt::make_initializer(run.identity.model, run.identity.seed));
  return run;
}

}  // namespace ziggurat::cli
