// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_ranks_test.cc: engines of several ranks against the same training in plain
// arrays: every stage, placement, bucket size and type of reduction gives one set of bits; a run
// goes on where all ranks stand; ranks that part ways are told so, and none waits for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";

struct World {
  const char* name;
  int ranks = 2;
  int stage = 2;
  const char* placement = kDemo;
  float clip_norm = 1.0F;
  std::size_t threads = 1;
  std::uint64_t bucket_elements = std::uint64_t{4} << 20;
  DType dtype = DType::kBFloat16;
  std::optional<DType> reduce_dtype{};
  std::uint64_t device_bytes = 8 * kMiB;
};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

class EngineRanks : public ::testing::TestWithParam<World> {
 protected:
  EngineConfig config() const {
    const World& world = GetParam();
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(world.placement);
    config.clip_norm = world.clip_norm;
    config.zero_stage = world.stage;
    config.reduce_bucket_elements = world.bucket_elements;
    config.reduce_dtype = world.reduce_dtype;
    return config;
  }
  ModelSpec model() const {
    ModelSpec model = small_model();
    model.dtype = GetParam().dtype;
    return model;
  }
  PlainTraining plain() const {
    PlainTraining plain(model(), GetParam().clip_norm);
    plain.world_size = GetParam().ranks;
    plain.reduce_dtype = GetParam().reduce_dtype;
    return plain;
  }
  const ScratchDirectory directory_;
};

TEST_P(EngineRanks, GiveTheBitsOfPlainArrays) {
  constexpr std::uint64_t kSteps = 4;
  const World& world = GetParam();
  const auto runtimes = connected_runtimes(world.ranks, world.threads);
  PlainTraining expected = plain();
  std::vector<double> norms;
  for (std::uint64_t step = 0; step < kSteps; ++step)
    norms.push_back(expected.step(step, kLearningRate));
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model(), config(), world.device_bytes);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const StepResult result =
          train_step(*rig.engine, model(), step, kLearningRate, {}, 1.0F, rank);
      EXPECT_EQ(result.grad_norm, norms[step]) << "rank " << rank << ", step " << step;
    }
    EXPECT_TRUE(same_params(*rig.engine, expected, model())) << "rank " << rank;
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), kSteps);
  });
  expect_none(errors);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineRanks,
    ::testing::Values(
        World{.name = "Stage0", .stage = 0}, World{.name = "Stage1", .stage = 1},
        World{.name = "Stage2", .stage = 2}, World{.name = "Stage3", .stage = 3},
        World{.name = "Stage0AllNvme", .stage = 0, .placement = "all=nvme"},
        World{.name = "Stage2AllNvme", .stage = 2, .placement = "all=nvme"},
        World{.name = "Stage3AllNvme", .stage = 3, .placement = "all=nvme"},
        World{.name = "Stage0AllDevice", .stage = 0, .placement = "all=device"},
        World{.name = "Stage2AllDevice", .stage = 2, .placement = "all=device"},
        World{.name = "Stage3AllDevice", .stage = 3, .placement = "all=device"},
        World{.name = "Stage2AllHost", .stage = 2, .placement = "all=host"},
        World{.name = "Stage3AllHost", .stage = 3, .placement = "all=host"},
        World{.name = "Stage0Unclipped", .stage = 0, .clip_norm = 0},
        World{.name = "Stage2Unclipped", .stage = 2, .clip_norm = 0},
        World{.name = "Stage3Unclipped", .stage = 3, .clip_norm = 0},
        World{.name = "ThreeRanksStage0", .ranks = 3, .stage = 0},
        World{.name = "ThreeRanksStage2", .ranks = 3, .stage = 2, .bucket_elements = 1},
        World{.name = "FourRanksStage3", .ranks = 4, .stage = 3, .bucket_elements = 100'000},
        World{.name = "Stage0OneTileBuckets", .stage = 0, .threads = 2, .bucket_elements = 1},
        World{.name = "Stage3OneTileBuckets", .stage = 3, .threads = 2, .bucket_elements = 1},
        World{.name = "Stage0Fp32Sums", .stage = 0, .reduce_dtype = DType::kFloat32},
        World{.name = "Stage2Fp32Sums", .stage = 2, .reduce_dtype = DType::kFloat32},
        World{
            .name = "Stage2Fp32InBf16", .dtype = DType::kFloat32, .reduce_dtype = DType::kBFloat16},
        World{.name = "Stage0Fp32InBf16",
              .stage = 0,
              .dtype = DType::kFloat32,
              .reduce_dtype = DType::kBFloat16},
        World{.name = "Stage3Fp16", .stage = 3, .dtype = DType::kFloat16},
        World{.name = "Stage3LittleDeviceMemory", .stage = 3, .device_bytes = 5 * kMiB / 2}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace ziggurat::testing
