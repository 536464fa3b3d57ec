// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_traffic_test.cc: the bytes that ranks sent in a step, counted where they are
// sent, against what core/sharding/traffic.h said they would be.
#include <gtest/gtest.h>

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

/// What rank 0 sent in a step, on average over kSteps, all of it done.
double sent_in_a_step(int ranks, int stage, std::optional<DType> reduce_dtype) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.host_budget_bytes = 64 * kMiB;
  config.zero_stage = stage;
  config.reduce_dtype = reduce_dtype;
  config.max_reuse_distance = 0;  // a unit goes after each use
  const auto runtimes = connected_runtimes(ranks, 1);
  double sent = 0;
  const auto errors = run_ranks(ranks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    RankRig rig(runtime, medium_model(), config, 32 * kMiB);
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

double planned(int ranks, int stage, std::optional<DType> reduce_dtype) {
  const ModelSpec model = medium_model();
  const TrafficRequest request{.model = model_size(model, 1),
                               .recipe = {.reduce_dtype = reduce_dtype.value_or(model.dtype)},
                               .strategy = resolve({.zero_stage = stage}, ranks),
                               .dp_ranks_per_node = ranks};
  return static_cast<double>(step_traffic(request).sent().total());
}

// Norms and agreements are beside it: 8 bytes a tile of 16,384 elements, and some words a step.
TEST(EngineTraffic, IsWhatWasPlannedInEveryStage) {
  struct World {
    int ranks;
    std::optional<DType> reduce_dtype;
  };
  for (const auto& [ranks, reduce_dtype] :
       {World{2, {}}, World{2, DType::kFloat32}, World{3, {}}, World{4, {}}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      const double expected = planned(ranks, stage, reduce_dtype);
      const double sent = sent_in_a_step(ranks, stage, reduce_dtype);
      EXPECT_GE(sent, expected) << "stage " << stage << " on " << ranks;
      EXPECT_LE(sent, 1.005 * expected) << "stage " << stage << " on " << ranks;
    }
  }
}

}  // namespace
}  // namespace ziggurat::testing
