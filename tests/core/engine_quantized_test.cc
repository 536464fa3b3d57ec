// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_quantized_test.cc: engines of several ranks that exchange parameters in 8 bits
// and gradients in 8 or 4, against the same training in plain arrays: one set of bits for a layout
// of ranks and nodes, wherever state is; and what is refused or said at open.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_quantized_test {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr Quantization kWeights{.weights = true};
constexpr Quantization k8Bits{.gradient_bits = 8};
constexpr Quantization kBoth{.weights = true, .gradient_bits = 4};

struct World {
  const char* name;
  int ranks = 4;
  int ranks_per_node = 2;
  Quantization quantization = kBoth;
  int node_ranks = 0;
  const char* placement = "params=host,grads=host,optimizer=nvme";
  std::size_t threads = 1;
  std::uint64_t bucket_elements = kReduceBucketCount;
  DType dtype = DType::kBFloat16;
  std::uint64_t device_bytes = 8 * kMiB;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;
};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

EngineConfig config_of(const World& world, const ScratchDirectory& directory) {
  EngineConfig config = small_config(directory.path());
  config.strategy.zero_stage = 3;
  config.quantization = world.quantization;
  config.ranks_per_node = world.ranks_per_node;
  config.strategy.hpz = world.node_ranks;
  config.placement = parse_placement(world.placement);
  config.reduce_bucket_elements = world.bucket_elements;
  config.speculation = world.speculation;
  return config;
}

ModelSpec model_of(const World& world) {
  ModelSpec model = small_model();
  model.dtype = world.dtype;
  return model;
}

PlainTraining plain_of(const World& world) {
  PlainTraining plain(model_of(world), 1.0F);
  plain.world_size = world.ranks;
  plain.quantization = world.quantization;
  plain.ranks_per_node = world.ranks_per_node;
  return plain;
}

class EngineQuantized : public ::testing::TestWithParam<World> {};

TEST_P(EngineQuantized, GivesTheBitsOfPlainArrays) {
  constexpr std::uint64_t kSteps = 4;
  const World& world = GetParam();
  const ScratchDirectory directory;
  const ModelSpec model = model_of(world);
  PlainTraining expected = plain_of(world);
  std::vector<double> norms;
  for (std::uint64_t step = 0; step < kSteps; ++step)
    norms.push_back(expected.step(step, kLearningRate));
  const auto runtimes = connected_runtimes(world.ranks, world.threads);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config_of(world, directory),
                world.device_bytes);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const StepResult result = train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
      EXPECT_EQ(result.grad_norm, norms[step]) << "rank " << rank << ", step " << step;
    }
    EXPECT_TRUE(same_params(*rig.engine, expected, model)) << "rank " << rank;
    rig.engine->make_durable();
  });
  expect_none(errors);
}

constexpr auto kGuess = EngineConfig::Speculation::kAlways;
constexpr std::uint64_t kTight = 5 * kMiB / 2;  // of device memory: not all units

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineQuantized,
    ::testing::Values(
        World{.name = "Weights", .ranks = 2, .quantization = kWeights},
        World{.name = "Gradients", .ranks = 2, .quantization = k8Bits},
        World{.name = "OneNode", .ranks = 2},
        World{.name = "ANodeEach", .ranks = 2, .ranks_per_node = 1},
        World{.name = "OneNodeOfThree", .ranks = 3, .ranks_per_node = 3, .bucket_elements = 1},
        World{.name = "TwoNodes"},
        World{.name = "TwoNodes8BitsHost", .quantization = k8Bits, .placement = "all=host"},
        World{.name = "TwoNodesDeviceOneTileBuckets",
              .placement = "all=device",
              .threads = 2,
              .bucket_elements = 1},
        World{.name = "TwoNodesSecondPartition", .node_ranks = 2},
        World{.name = "TwoNodesNvmeGuessWrong",
              .node_ranks = 2,
              .placement = "all=nvme",
              .bucket_elements = 100'000,
              .device_bytes = kTight,
              .speculation = kGuess},
        World{.name = "Fp32", .ranks = 2, .ranks_per_node = 1, .dtype = DType::kFloat32},
        World{.name = "Fp16", .ranks = 2, .dtype = DType::kFloat16}),
    [](const auto& one) { return std::string(one.param.name); });

// An infinity makes its block NaN on its way, so all ranks skip the step.
TEST(EngineQuantizedOverflow, SkipsTheStepOnAllRanks) {
  const World world{.name = "overflow", .ranks = 2, .ranks_per_node = 1};
  const ScratchDirectory directory;
  const ModelSpec model = model_of(world);
  PlainTraining expected = plain_of(world);
  expected.loss_scale = 16;
  for (const std::uint64_t step : {0U, 2U}) expected.step(step, kLearningRate);
  const auto runtimes = connected_runtimes(world.ranks, 1);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config_of(world, directory));
    for (std::uint64_t step = 0; step < 3; ++step) {
      for (auto u = static_cast<UnitId>(model.units.size()); u-- > 0;) {
        const auto params = HostDevice::view(rig.engine->acquire(u));
        const auto gradient = HostDevice::view(rig.engine->gradient(u));
        for (std::size_t i = 0; i < params.count(); ++i)
          gradient[i] += 16 * gradient_of(value_at(params, i), u, i, step, rank);
        if (step == 1 && rank == 1 && u == 2) gradient[7] = std::numeric_limits<float>::infinity();
        rig.engine->release(u);
        rig.engine->finish_gradient(u);
      }
      const StepOptions options{.learning_rate = kLearningRate, .loss_scale = 16.0F, .blob = {}};
      EXPECT_EQ(rig.engine->step(options).skipped, step == 1) << "rank " << rank;
    }
    EXPECT_TRUE(same_params(*rig.engine, expected, model)) << "rank " << rank;
    rig.engine->make_durable();
  });
  expect_none(errors);
}

// Whoever waits for a buffer, a turn or a peer is told; nobody waits on.
TEST(EngineQuantizedDeath, OfARankInBackwardIsAnErrorOnTheOthers) {
  const World world{.name = "death", .node_ranks = 2, .bucket_elements = 1};
  const ScratchDirectory directory;
  const ModelSpec model = model_of(world);
  const auto runtimes = connected_runtimes(world.ranks, 1);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config_of(world, directory));
    train_step(*rig.engine, model, 0, kLearningRate, {}, 1.0F, rank);
    if (rank == 3) {
      pass_step(*rig.engine, model, 1, kLearningRate, 1.0F, 2, rank);
      throw Error(ErrorCode::kInvalidArgument, "the trainer's own");
    }
    train_step(*rig.engine, model, 1, kLearningRate, {}, 1.0F, rank);
    rig.engine->make_durable();
  });
  for (int rank = 0; rank < 3; ++rank) {
    const Error error = error_in(errors[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("rank 3"));
  }
}

/// What `ranks` ranks are told that open with small settings in stage 3, but for `edit`'s.
template <class Edit>
std::string refusal_of(int ranks, const Edit& edit) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.strategy.zero_stage = 3;
  edit(config);
  const auto runtimes = connected_runtimes(ranks, 1);
  const auto errors = run_ranks(ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], small_model(), config);
  });
  return error_in(errors[0]).what();
}

TEST(EngineQuantizedOpen, RefusesWhatDoesNotTravelSo) {
  EXPECT_THAT(refusal_of(2,
                         [](EngineConfig& config) {
                           config.strategy.zero_stage = 2;
                           config.quantization = kWeights;
                         }),
              HasSubstr("this run has stage 2"));
  EXPECT_THAT(refusal_of(1, [](EngineConfig& config) { config.quantization = k8Bits; }),
              HasSubstr("`quantized_gradients=8` cannot be used with one rank"));
  EXPECT_THAT(refusal_of(2, [](EngineConfig& config) { config.quantization.gradient_bits = 6; }),
              HasSubstr("`quantized_gradients=6` is not supported: give 4 or 8"));
  EXPECT_THAT(refusal_of(3,
                         [](EngineConfig& config) {
                           config.quantization = kBoth;
                           config.ranks_per_node = 2;
                         }),
              HasSubstr("3 ranks do not fill nodes of 2"));
  EXPECT_THAT(refusal_of(2,
                         [](EngineConfig& config) {
                           config.quantization = k8Bits;
                           config.reduce_dtype = DType::kFloat32;
                         }),
              HasSubstr("`reduce_dtype=fp32` and `quantized_gradients=8`"));
}

TEST(EngineQuantizedOpen, RefusesRanksThatSeeOtherNodes) {
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    World world{.name = "apart", .ranks = 2, .ranks_per_node = 1 + rank};
    world.quantization.gradient_bits = rank == 0 ? 8 : 4;
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], small_model(),
                config_of(world, directory));
  });
  for (const std::exception_ptr& thrown : errors) {
    EXPECT_THAT(error_in(thrown).what(),
                HasSubstr("differ in `quantized_gradients` (rank 0 has 8 and rank 1 has 4) and in "
                          "`ranks_per_node` (rank 0 has 1 and rank 1 has 2);"));
  }
}

TEST(EngineQuantizedOpen, SaysHowFarOffEachValueMayBe) {
  const World world{.name = "described"};
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(world.ranks, 1);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], small_model(),
                config_of(world, directory));
    EXPECT_THAT(
        rig.engine->description(),
        ::testing::IsSupersetOf(
            {HasSubstr("parameters travel between ranks in 8 bits: each value is within 0.40 % of "
                       "the largest in its block of 256"),
             HasSubstr("gradients travel between ranks in 4 bits: each value is within 7.15 % of "
                       "the largest in its block of 256; they are rounded between the 2 ranks of a "
                       "node, and their sums are rounded again between 2 nodes")}));
    rig.engine->make_durable();
  });
  expect_none(errors);
}

}  // namespace engine_quantized_test
}  // namespace ziggurat::testing
