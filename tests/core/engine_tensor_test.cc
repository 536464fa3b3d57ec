// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_tensor_test.cc: engines of ranks that divide every layer: together they hold
// what one set of plain arrays does, in every ZeRO stage among the ranks of a part; their norm
// counts what is not divided once; and ranks whose shared gradients differ are told so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>

#include "tests/core/tensor_rig.h"

namespace ziggurat::testing {
namespace engine_tensor_test {

using ::testing::HasSubstr;

constexpr std::uint64_t kSteps = 3;

PartRig on_host(Runtime& runtime, const EngineConfig& config) {
  return {runtime, config, HostDevice::create(runtime.reactor, 8 * kMiB),
          std::make_unique<HostBytes>()};
}

struct World {
  const char* name;
  int parts = 2;
  int data = 2;
  int stage = 2;
  const char* placement = "params=host,grads=host,optimizer=nvme";
  std::uint64_t bucket_elements = std::uint64_t{4} << 20;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;
  int shard_group = 0;
  int node_ranks = 0;
  std::size_t threads = 1;
};
void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

/// Its destructor waits for all ranks.
struct Together {
  std::barrier<>& all;
  ~Together() { all.arrive_and_wait(); }
};

EngineConfig config_of(const World& world, const std::string& directory) {
  EngineConfig config = small_config(directory);
  config.tensor_parallel = world.parts;
  config.strategy.zero_stage = world.stage;
  config.placement = parse_placement(world.placement);
  config.reduce_bucket_elements = world.bucket_elements;
  config.speculation = world.speculation;
  config.strategy.shard_group = world.shard_group;
  if (world.shard_group > 0) config.strategy.name = StrategyName::kHybrid;
  config.strategy.hpz = world.node_ranks;
  return config;
}

PlainTraining plain_of(const World& world, float clip_norm) {
  PlainTraining plain(whole_model(), clip_norm);
  plain.world_size = world.data;
  plain.shard_group = world.shard_group;
  return plain;
}

class EngineTensor : public ::testing::TestWithParam<World> {};

TEST_P(EngineTensor, HoldsTheBitsOfPlainArrays) {
  const World& world = GetParam();
  const ScratchDirectory directory;
  PlainTraining expected = plain_of(world, 0);
  std::vector<double> norms;
  for (std::uint64_t step = 0; step < kSteps; ++step)
    norms.push_back(expected.step(step, kPartLearningRate));
  EngineConfig config = config_of(world, directory.path());
  config.clip_norm = 0;
  config.speculation = EngineConfig::Speculation::kAuto;
  const int ranks = world.parts * world.data;
  const auto runtimes = connected_runtimes(ranks, world.threads);
  const auto errors = run_ranks(ranks, [&](int rank) {
    PartRig rig = on_host(*runtimes[static_cast<std::size_t>(rank)], config);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      // Squares are added in another order.
      EXPECT_NEAR(rig.step(step).grad_norm, norms[step], 1e-6 * norms[step]) << "rank " << rank;
    }
    EXPECT_TRUE(rig.has_params_of(expected)) << "rank " << rank;
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), kSteps);
  });
  expect_none(errors);
}

/// The norms of a clipped run's steps, the same on all ranks.
std::vector<double> clipped_norms(const World& world) {
  const ScratchDirectory directory;
  const EngineConfig config = config_of(world, directory.path());
  const int ranks = world.parts * world.data;
  const auto runtimes = connected_runtimes(ranks, world.threads);
  std::vector<std::vector<double>> norms(static_cast<std::size_t>(ranks));
  const auto errors = run_ranks(ranks, [&](int rank) {
    PartRig rig = on_host(*runtimes[static_cast<std::size_t>(rank)], config);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const StepResult result = rig.step(step);
      EXPECT_TRUE(result.clipped);
      norms[static_cast<std::size_t>(rank)].push_back(result.grad_norm);
    }
    rig.engine->make_durable();
  });
  expect_none(errors);
  for (const auto& its : norms) EXPECT_EQ(its, norms[0]);
  return norms[0];
}

// A clipped norm is in every parameter's bits, and those in the next step's norm.
TEST_P(EngineTensor, HasTheNormOfItsLayoutInEveryStage) {
  const World& world = GetParam();
  const World reference{.name = "reference",
                        .parts = world.parts,
                        .data = world.data,
                        .stage = world.shard_group > 0 ? 2 : 0,
                        .shard_group = world.shard_group};
  EXPECT_EQ(clipped_norms(world), clipped_norms(reference));
}

constexpr auto kGuess = EngineConfig::Speculation::kAlways;
INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineTensor,
    ::testing::Values(
        World{.name = "TwoPartsOfOneRank", .data = 1}, World{.name = "Stage0", .stage = 0},
        World{.name = "Stage1AllNvme", .stage = 1, .placement = "all=nvme"},
        World{.name = "Stage2OneTileBuckets", .stage = 2, .bucket_elements = 1},
        World{.name = "Stage2AllHost", .stage = 2, .placement = "all=host", .threads = 2},
        World{.name = "Stage2GuessesWrong", .stage = 2, .speculation = kGuess},
        World{.name = "Stage3", .stage = 3},
        World{.name = "Stage3AllNvme", .stage = 3, .placement = "all=nvme"},
        World{.name = "Stage3AllDevice", .stage = 3, .placement = "all=device"},
        World{.name = "FourPartsStage3OfTwo", .parts = 4, .stage = 3},
        World{.name = "ThreeDataRanksStage3", .data = 3, .stage = 3, .bucket_elements = 1},
        World{.name = "TwoGroupsOfTwo", .data = 4, .stage = 3, .shard_group = 2},
        World{.name = "TwoGroupsOfTwoAllNvme",
              .data = 4,
              .stage = 3,
              .placement = "all=nvme",
              .shard_group = 2},
        World{.name = "TwoNodesOfTwo", .data = 4, .stage = 3, .node_ranks = 2}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(EngineTensorStore, GoesOnInAnyStageAndRefusesAnotherDivision) {
  const ScratchDirectory directory;
  const World world{.name = "stage 3", .stage = 3};
  PlainTraining expected = plain_of(world, 0);
  std::uint64_t first = 0;
  for (const int stage : {3, 1}) {
    EngineConfig config = config_of(world, directory.path());
    config.clip_norm = 0;
    config.strategy.zero_stage = stage;
    for (std::uint64_t step = first; step < first + 2; ++step)
      expected.step(step, kPartLearningRate);
    const auto runtimes = connected_runtimes(4, 1);
    const auto errors = run_ranks(4, [&](int rank) {
      PartRig rig = on_host(*runtimes[static_cast<std::size_t>(rank)], config);
      EXPECT_EQ(rig.engine->generation(), first);
      for (std::uint64_t step = first; step < first + 2; ++step) rig.step(step);
      EXPECT_TRUE(rig.has_params_of(expected)) << "stage " << stage << ", rank " << rank;
      rig.engine->make_durable();
    });
    expect_none(errors);
    first += 2;
  }
  EngineConfig config = config_of(world, directory.path());
  config.tensor_parallel = 4;
  const auto runtimes = connected_runtimes(4, 1);
  const auto errors =
      run_ranks(4, [&](int rank) { on_host(*runtimes[static_cast<std::size_t>(rank)], config); });
  for (const std::exception_ptr& thrown : errors) {
    EXPECT_THAT(error_in(thrown).what(),
                HasSubstr("made by 4 ranks of which each 2 divide the layers, but this run has "
                          "`nproc=4` `tp=4`: give `nproc=4` `tp=2`"));
  }
}

// A machine that computes otherwise, or wrong, would make parts of one model drift apart.
TEST(EngineTensorRanks, AreToldWhoseSharedGradientsDifferBeforeAnythingIsUpdated) {
  for (const int stage : {0, 3}) {
    const ScratchDirectory directory;
    const EngineConfig config =
        config_of({.name = "fault", .parts = 2, .data = 2, .stage = stage}, directory.path());
    const auto runtimes = connected_runtimes(4, 1);
    std::barrier<> all_done(4);
    const auto errors = run_ranks(4, [&](int rank) {
      PartRig rig = on_host(*runtimes[static_cast<std::size_t>(rank)], config);
      const Together leaving{all_done};  // an engine that closes ends what others are still in
      rig.step(0);
      rig.engine->make_durable();
      rig.step(1, rank == 3 ? 1e-3F : 0);
    });
    for (const std::exception_ptr& thrown : errors) {
      const Error error = error_in(thrown);
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), HasSubstr("unit 1 ('layer')"));
    }
  }
}

TEST(EngineTensorOpen, RefusesRanksThatDoNotDivideAndThatDoNotAgree) {
  const ScratchDirectory directory;
  {
    const auto runtimes = connected_runtimes(3, 1);
    const auto errors = run_ranks(3, [&](int rank) {
      const EngineConfig config = config_of({.name = "three"}, directory.path());
      on_host(*runtimes[static_cast<std::size_t>(rank)], config);
    });
    for (const std::exception_ptr& thrown : errors)
      EXPECT_THAT(error_in(thrown).what(), HasSubstr("1 would be left over"));
  }
  const auto runtimes = connected_runtimes(4, 1);
  const auto errors = run_ranks(4, [&](int rank) {
    const EngineConfig config =
        config_of({.name = "four", .parts = rank == 0 ? 4 : 2}, directory.path());
    on_host(*runtimes[static_cast<std::size_t>(rank)], config);
  });
  for (const std::exception_ptr& thrown : errors)
    EXPECT_THAT(error_in(thrown).what(), HasSubstr("tp"));
}

}  // namespace engine_tensor_test
}  // namespace ziggurat::testing
