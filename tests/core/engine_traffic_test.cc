// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_traffic_test.cc: the bytes that ranks sent in a step, counted where they are
// sent, against what core/sharding/traffic.h said they would be.
#include <gtest/gtest.h>

#include <barrier>

#include "core/sharding/traffic.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace {

constexpr std::uint64_t kSteps = 2;

/// Units that pad differently on every number of ranks.
ModelSpec medium_model() {
  ModelSpec model{.name = "medium", .units = {}};
  for (const std::int64_t rows : {1300, 2000, 2049, 1500}) {
    const std::string unit = "unit" + std::to_string(rows);
    model.units.push_back({.name = unit, .params = {{unit + ".weight", {rows, 256}}}});
  }
  return model;
}

std::uint64_t payload_sent(Runtime& runtime) {
  return runtime.reactor.block_on([](Runtime& its) -> Task<std::uint64_t> {
    const Traffic traffic = its.ranks->traffic();
    co_return traffic.same_host.payload_bytes + traffic.other_hosts.payload_bytes;
  }(runtime));
}

/// Its destructor waits for all ranks.
struct Together {
  std::barrier<>& all;
  ~Together() { all.arrive_and_wait(); }
};

struct World {
  const char* name;
  int ranks;
  StrategyRequest request;
  std::optional<DType> reduce_dtype{};
};

/// What rank 0 sent in a step, on average over kSteps, all of it done.
double sent_in_a_step(const World& world) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  const int ranks = world.ranks;
  const int stage = resolve(world.request, ranks).zero_stage;
  config.host_budget_bytes = 64 * kMiB;
  config.zero_stage = stage;
  config.shard_group = world.request.shard_group;
  config.node_ranks = world.request.hpz;
  config.reduce_dtype = world.reduce_dtype;
  config.max_reuse_distance = 0;  // a unit goes after each use
  const auto runtimes = connected_runtimes(ranks, 1);
  double sent = 0;
  std::barrier<> all_done(ranks);
  const auto errors = run_ranks(ranks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    RankRig rig(runtime, medium_model(), config, 32 * kMiB);
    const Together leaving{all_done};  // an engine that closes ends what others are still in
    const auto steps = [&](std::uint64_t first, std::uint64_t count) {
      for (std::uint64_t step = first; step < first + count; ++step)
        train_step(*rig.engine, medium_model(), step, 0.01F, {}, 1.0F, rank);
      rig.engine->make_durable();
      for (UnitId u = 0; stage < 3 && u < medium_model().units.size(); ++u) {
        rig.engine->acquire(u);  // once new parameters have come from all ranks
        rig.engine->release(u);
      }
      return payload_sent(runtime);
    };
    const std::uint64_t before = steps(0, 1);
    const std::uint64_t after = steps(1, kSteps);
    if (rank == 0) sent = static_cast<double>(after - before) / kSteps;
  });
  expect_none(errors);
  return sent;
}

double planned(const World& world) {
  const ModelSpec model = medium_model();
  const TrafficRequest request{.model = model_size(model, 1),
                               .recipe = {.reduce_dtype = world.reduce_dtype.value_or(model.dtype)},
                               .strategy = resolve(world.request, world.ranks),
                               .dp_ranks_per_node = world.ranks};
  return static_cast<double>(step_traffic(request).sent().total());
}

class EngineTraffic : public ::testing::TestWithParam<World> {};

// Norms and agreements are beside it: 8 bytes a tile of 16,384 elements, and some words a step.
TEST_P(EngineTraffic, IsWhatWasPlanned) {
  const double expected = planned(GetParam());
  const double sent = sent_in_a_step(GetParam());
  EXPECT_GE(sent, expected);
  EXPECT_LE(sent, 1.005 * expected);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineTraffic,
    ::testing::Values(
        World{"Stage0", 2, {.zero_stage = 0}}, World{"Stage1", 2, {.zero_stage = 1}},
        World{"Stage2", 2, {.zero_stage = 2}}, World{"Stage3", 2, {.zero_stage = 3}},
        World{"Stage0Fp32Sums", 2, {.zero_stage = 0}, DType::kFloat32},
        World{"Stage2Fp32Sums", 2, {.zero_stage = 2}, DType::kFloat32},
        World{"Stage3Fp32Sums", 2, {.zero_stage = 3}, DType::kFloat32},
        World{"Stage0Of3", 3, {.zero_stage = 0}}, World{"Stage2Of3", 3, {.zero_stage = 2}},
        World{"Stage3Of3", 3, {.zero_stage = 3}}, World{"Stage1Of4", 4, {.zero_stage = 1}},
        World{"Stage3Of4", 4, {.zero_stage = 3}}, World{"HpzOf4", 4, {.hpz = 2}},
        World{"Hybrid2x2", 4, {.name = StrategyName::kHybrid, .shard_group = 2}},
        World{
            "HybridStage2", 4, {.zero_stage = 2, .name = StrategyName::kHybrid, .shard_group = 2}}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace ziggurat::testing
