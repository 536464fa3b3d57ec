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

void give_masters(StoredRun& run, UnitId unit) {
  const auto give = [&](std::span<const float> values) {
    const std::uint64_t count = values.size();
    run.ranks->send(std::as_bytes(std::span(&count, 1)), 0);
    if (count > 0) run.ranks->send(std::as_bytes(values), 0);
  };
  run.engine->read_master(unit,
                          [&](std::uint64_t, std::span<const float> values) { give(values); });
  give({});
}

/// Run by run, until an empty one.
void take_masters(TrainRanks& ranks, int from, const StoredRun::Consume& consume) {
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

/// Of rank 0: what the ranks of tensor-parallel part `part` have of `unit`.
void take_part(StoredRun& run, UnitId unit, int part, const StoredRun::Consume& consume) {
  for (int slice = 0; slice < run.slices; ++slice) {
    const int from = slice * run.parts + part;
    if (from > 0)
      take_masters(*run.ranks, from, consume);
    else
      run.engine->read_master(
          unit, [&](std::uint64_t, std::span<const float> values) { consume(values); });
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
  run.parts = info.sharding.tensor.ranks;
  run.identity.model.part = {.rank = run.ranks->rank() % run.parts, .ranks = run.parts};
  const ModelSpec part = gpt::make_spec(run.identity.model);
  const std::uint64_t device_bytes =
      budgets.device_bytes != 0 ? budgets.device_bytes : smallest_device_bytes(part, info.sharding);
  run.device = HostDevice::create(run.runtime->reactor, device_bytes);

  EngineConfig config;
  config.tensor_parallel = run.parts;
  config.strategy.zero_stage = info.sharding.stage;
  if (info.sharding.replicas > 1) {
    config.strategy.name = StrategyName::kHybrid;
    config.strategy.shard_group = info.sharding.world_size;
  }
  if (info.sharding.params_sharded()) run.slices = info.sharding.world_size;
  config.store = store;
  config.host_budget_bytes = budgets.host_bytes;
  config.optimizer.state = info.state;
  config.run_identity = info.run_identity;
  config.numerics_fingerprint = gpt::numerics_fingerprint();
  config.progress = [&console](const char* what, std::uint64_t done, std::uint64_t total) {
    console.progress(what, done, total);
  };
  run.engine = Engine::open(part, config, *run.runtime, *run.device,
                            gpt::make_initializer(run.identity.model, run.identity.seed));
  return run;
}

void StoredRun::read_masters(UnitId unit, const Consume& consume) {
  const int own = ranks->rank();
  if (own / parts >= slices) return;  // another copy's
  if (own > 0) return give_masters(*this, unit);
  if (parts == 1) return take_part(*this, unit, 0, consume);
  // Whole at once: its parts lie between each other.
  const UnitSpec part = part_of(spec.units[unit], parts);
  std::vector<float> whole(spec.units[unit].count());
  std::vector<float> values;
  for (int rank = 0; rank < parts; ++rank) {
    values.clear();
    take_part(*this, unit, rank, [&](std::span<const float> more) {
      values.insert(values.end(), more.begin(), more.end());
    });
    for_each_run(part, {.rank = rank, .ranks = parts}, 0, values.size(), [&](const PartRun& run) {
      std::copy_n(values.data() + run.begin, run.count, whole.data() + run.whole_begin);
    });
  }
  consume(whole);
}

void StoredRun::part() {
  engine->make_durable();
  ranks->part();
}

}  // namespace ziggurat::cli
