// SPDX-License-Identifier: Apache-2.0
// integrations/cli/stored_run.cc: inspect, then open with what the store says.
#include "integrations/cli/stored_run.h"

#include <fmt/format.h>

#include <vector>

#include "collectives/rendezvous/rendezvous.h"
#include "integrations/cli/store_paths.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {
StoredRun StoredRun::open(const std::string& directory, Budgets budgets, Console& console) {
  const std::vector<StoreDirectory> store = parse_store(directory);
  if (!store_exists(store)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--store {}: no store is there; `ziggurat train --store {}` makes one",
                            directory, directory));
  }
  StoredRun run;
  run.runtime = Runtime::create({});
  run.runtime->ranks = connect_ranks(run.runtime->reactor, *run.runtime->workers, rank_options());
  run.ranks = std::make_unique<TrainRanks>(*run.runtime);
  if (!run.ranks->first()) console.silence();
  const StoreInfo info = Engine::inspect(*run.runtime, store);
  run.identity = RunIdentity::parse(info.run_identity);
  run.identity.model.dtype = info.dtype;
  run.spec = gpt::make_spec(run.identity.model);
  run.layout.parts = info.sharding.tensor.ranks;
  run.place = place_of(run.ranks->rank(), run.ranks->count(), run.layout.parts);
  run.identity.model.part = {.rank = run.place.tensor, .ranks = run.place.tensor_ranks()};
  const ModelSpec part = gpt::make_spec(run.identity.model);

  EngineConfig config;
  const std::uint64_t device_bytes = budgets.device_bytes != 0
                                         ? budgets.device_bytes
                                         : smallest_budgets({.model = part,
                                                             .state = info.state,
                                                             .sharding = info.sharding,
                                                             .placement = config.placement})
                                               .device_bytes;
  run.device = HostDevice::create(run.runtime->reactor, device_bytes);
  config.tensor_parallel = run.layout.parts;
  config.strategy.zero_stage = info.sharding.stage;
  if (info.sharding.replicas > 1) {
    config.strategy.name = StrategyName::kHybrid;
    config.strategy.shard_group = info.sharding.world_size;
  }
  if (info.sharding.params_sharded()) run.layout.slices = info.sharding.world_size;
  config.store = store;
  config.host_budget_bytes = budgets.host_bytes;
  config.optimizer.state = info.state;
  for (const std::string& name : info.constant_params)
    config.param_groups.push_back({.params = name, .frozen = true});
  config.run_identity = info.run_identity;
  config.numerics_fingerprint = gpt::numerics_fingerprint();
  config.progress = [&console](const char* what, std::uint64_t done, std::uint64_t total) {
    console.progress(what, done, total);
  };
  run.engine = Engine::open(part, config, *run.runtime, *run.device,
                            gpt::make_initializer(run.identity.model, run.identity.seed));
  return run;
}

WholeModel StoredRun::masters() {
  return {spec, layout, runtime->reactor, ranks->channel(),
          [its = engine.get()](UnitId unit, const WholeModel::Consume& consume) {
            its->read_master(
                unit, [&](std::uint64_t, std::span<const float> values) { consume(values); });
          }};
}

void StoredRun::part() {
  engine->make_durable();
  ranks->part();
}

}  // namespace ziggurat::cli
