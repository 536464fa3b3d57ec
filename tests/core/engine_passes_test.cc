// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_passes_test.cc: a trainer that runs each micro-batch of a step through the
// whole model: accumulators last from the first pass to the last, wherever state is, or the trainer
// is told what they need.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_passes_test {

using ::testing::HasSubstr;

struct World {
  const char* name;
  int ranks;
  int stage;
  const char* placement;
};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

class EnginePasses : public ::testing::TestWithParam<World> {};

// Two equal micro-batches are one of twice the gradient, exactly.
TEST_P(EnginePasses, AddUpToTheBitsOfOne) {
  constexpr std::uint64_t kSteps = 3;
  const World& world = GetParam();
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.strategy.zero_stage = world.stage;
  config.placement = parse_placement(world.placement);
  PlainTraining expected(model, 1.0F);
  expected.world_size = world.ranks;
  std::vector<double> norms;
  for (std::uint64_t step = 0; step < kSteps; ++step)
    norms.push_back(expected.step(step, 0.01F, 2.0F));
  const auto runtimes = connected_runtimes(world.ranks, 1);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
    for (std::uint64_t step = 0; step < kSteps; ++step)
      EXPECT_EQ(train_passes(*rig.engine, model, step, 2, rank).grad_norm, norms[step]);
    EXPECT_TRUE(same_params(*rig.engine, expected, model)) << "rank " << rank;
    rig.engine->make_durable();
  });
  expect_none(errors);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EnginePasses,
    ::testing::Values(World{"OneRank", 1, 2, "all=nvme"},
                      World{"Stage0", 2, 0, "params=host,grads=host,optimizer=nvme"},
                      World{"Stage2", 2, 2, "all=device"}, World{"Stage3", 2, 3, "all=nvme"},
                      World{"Stage3Host", 2, 3, "all=host"}),
    [](const auto& one) { return std::string(one.param.name); });

// Nobody waits for memory that nothing will give back, among ranks either.
TEST(EnginePassesMemory, ThatDoesNotHoldAllAccumulatorsIsAnErrorThatSaysSo) {
  ModelSpec model{.name = "equal units", .units = {}};  // of 256 KiB of accumulator
  for (const char* unit : {"a", "b", "c", "d", "e", "f"})
    model.units.push_back({.name = unit, .params = {{"weight", {256, 256}}}});
  for (const int stage : {0, 3}) {
    const ScratchDirectory directory;
    EngineConfig config = small_config(directory.path());
    config.strategy.zero_stage = stage;
    const auto runtimes = connected_runtimes(2, 1);
    const auto errors = run_ranks(2, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 3 * kMiB / 2);
      train_passes(*rig.engine, model, 0, 2, rank);
    });
    bool said = false;
    for (const std::exception_ptr& thrown : errors) {
      const Error error = error_in(thrown);
      if (error.code() != ErrorCode::kResourceExhausted) continue;  // told by the other
      said = true;
      EXPECT_THAT(error.what(), HasSubstr("`device_memory`"));
      EXPECT_THAT(error.what(), HasSubstr("gradients on the device"));
    }
    EXPECT_TRUE(said) << "stage " << stage;
  }
}

}  // namespace engine_passes_test
}  // namespace ziggurat::testing
