// SPDX-License-Identifier: Apache-2.0
// integrations/cli/stored_run.cc: inspect, then open with what the store says.
#include "integrations/cli/stored_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "collectives/rendezvous.h"
#include "integrations/cli/store_paths.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {
namespace {

/// What the engine takes when it opens: an accumulator of the largest unit, padded to whole slices,
/// and among ranks a place to gather it and accumulators of small ones.
std::uint64_t smallest_device_bytes(const ModelSpec& spec, const Sharding& sharding) {
  std::uint64_t largest = 0;
  for (const UnitSpec& unit : spec.units) largest = std::max(largest, unit.count());
  const std::uint64_t padded = slice_elements(largest, sharding.world_size) *
                               static_cast<std::uint64_t>(sharding.world_size);
  const std::uint64_t accumulators = sharding.params_sharded() ? 3 : 1;
  const std::uint64_t gathered = sharding.params_sharded() ? size_bytes(spec.dtype) : 0;
  return round_up(padded * (accumulators * sizeof(float) + gathered), kMiB) + 2 * kMiB;
}

/// Run by run, until an empty one.
void take_masters(TrainRanks& ranks, int from,
                  const std::function<void(std::span<const float>)>& consume) {
  std::vector<float> values;
  for (;;) {
    std::uint64_t count = 0;
    ranks.recv(std::as_writable_bytes(std::span(&count, 1)), from);
    if (count == 0) return;
    values.resize(count);
    ranks.recv(std::as_writable_bytes(std::span(values)), from);
    consume(values);
  }
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
  run.runtime->ranks = connect_ranks(run.runtime->reactor, *run.runtime->workers, rank_options());
  run.ranks = std::make_unique<TrainRanks>(*run.runtime);
  if (!run.ranks->first()) console.silence();
  const StoreInfo info = Engine::inspect(*run.runtime, store);
  run.identity = RunIdentity::parse(info.run_identity);
  run.identity.model.dtype = info.dtype;
  run.spec = gpt::make_spec(run.identity.model);
  const std::uint64_t device_bytes = budgets.device_bytes != 0
                                         ? budgets.device_bytes
                                         : smallest_device_bytes(run.spec, info.sharding);
  run.device = HostDevice::create(run.runtime->reactor, device_bytes);

  EngineConfig config;
  config.zero_stage = info.sharding.stage;
  if (info.sharding.replicas > 1) config.shard_group = info.sharding.world_size;
  if (info.sharding.params_sharded()) run.slices = info.sharding.world_size;
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

void StoredRun::read_masters(UnitId unit,
                             const std::function<void(std::span<const float>)>& consume) {
  const int own = ranks->rank();
  if (own >= slices) return;  // another copy's
  if (own == 0) {
    engine->read_master(unit,
                        [&](std::uint64_t, std::span<const float> values) { consume(values); });
    for (int rank = 1; rank < slices; ++rank) take_masters(*ranks, rank, consume);
    return;
  }
  const auto give = [&](std::span<const float> values) {
    const std::uint64_t count = values.size();
    ranks->send(std::as_bytes(std::span(&count, 1)), 0);
    if (count > 0) ranks->send(std::as_bytes(values), 0);
  };
  engine->read_master(unit, [&](std::uint64_t, std::span<const float> values) { give(values); });
  give({});
}

void StoredRun::part() {
  engine->make_durable();
  ranks->part();
}

}  // namespace ziggurat::cli
