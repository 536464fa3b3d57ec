// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_ranks_test.cc: engines of several ranks with a GPU each, over the double
// of the CUDA runtime: every stage gives the bits of plain arrays, whatever order the double runs
// its streams in, and the store is one that ranks without GPUs go on from; and what becomes of all
// when one loses its GPU. ZIGGURAT_SEEDS: orders of streams that each world is tried with (2; 1
// of more than two ranks).
#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/core/gpu_harness.h"
#include "tests/core/ranks_harness.h"
#include "tests/cuda_double/cuda_double.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat::testing {
namespace engine_cuda_ranks_test {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr float kLearningRate = 0.01F;
constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";

struct World {
  const char* name;
  int stage = 2;
  int ranks = 2;
  const char* placement = kDemo;
  float clip_norm = 1.0F;
  std::uint64_t bucket_elements = kReduceBucketCount;
  DType dtype = DType::kBFloat16;
  std::optional<DType> reduce_dtype{};
  int shard_group = 0;
  int node_ranks = 0;
  Quantization quantization{};
  int ranks_per_node = 0;
};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

EngineConfig config_of(const World& world, const ScratchDirectory& directory) {
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(world.placement);
  config.clip_norm = world.clip_norm;
  config.strategy.zero_stage = world.stage;
  config.strategy.shard_group = world.shard_group;
  if (world.shard_group > 0) config.strategy.name = StrategyName::kHybrid;
  config.strategy.hpz = world.node_ranks;
  config.reduce_bucket_elements = world.bucket_elements;
  config.reduce_dtype = world.reduce_dtype;
  config.quantization = world.quantization;
  config.ranks_per_node = world.ranks_per_node;
  return config;
}

ModelSpec model_of(const World& world) {
  ModelSpec model = small_model();
  model.dtype = world.dtype;
  return model;
}

PlainTraining plain_of(const World& world) {
  PlainTraining plain(model_of(world), world.clip_norm);
  plain.world_size = world.ranks;
  plain.shard_group = world.shard_group;
  plain.reduce_dtype = world.reduce_dtype;
  plain.quantization = world.quantization;
  plain.ranks_per_node = world.ranks_per_node;
  return plain;
}

/// A rank's GPU, its trainer and its engine.
struct GpuRank {
  GpuRank(Runtime& its_runtime, int rank, const ModelSpec& model, const EngineConfig& config)
      : device(CudaDevice::create(its_runtime.reactor, {.index = rank,
                                                        .capacity_bytes = 8 * kMiB,
                                                        .trace = its_runtime.trace.get(),
                                                        .metrics = &its_runtime.metrics})),
        gpu(std::make_unique<Gpu>(kMiB, rank)),
        engine(Engine::open(model, config, its_runtime, *device, initialize)) {}

  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<Gpu> gpu;
  std::unique_ptr<Engine> engine;
};

/// Says what every rank threw: one that stops ends the others.
void expect_good_ends(const std::vector<std::exception_ptr>& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank)
    if (errors[rank]) ADD_FAILURE() << "rank " << rank << ": " << error_in(errors[rank]).what();
}

class EngineCudaRanks : public ::testing::TestWithParam<World> {
 protected:
  static constexpr std::uint64_t kSteps = 3;

  /// Trains on GPUs, to a durable end.
  void train(const ScratchDirectory& directory, std::uint64_t seed) const {
    const World& world = GetParam();
    const ModelSpec model = model_of(world);
    PlainTraining expected = plain_of(world);
    std::vector<double> norms;
    for (std::uint64_t step = 0; step < kSteps; ++step)
      norms.push_back(expected.step(step, kLearningRate));
    cuda_double::reset(seed, {.devices = world.ranks});
    const auto runtimes = connected_runtimes(world.ranks, /*threads=*/1);
    const auto errors = run_ranks(world.ranks, [&](int rank) {
      GpuRank on(*runtimes[static_cast<std::size_t>(rank)], rank, model,
                 config_of(world, directory));
      EXPECT_THAT(on.engine->description(), Contains(HasSubstr("through host memory")));
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        const StepResult result = train_on(*on.gpu, *on.engine, model, step, kLearningRate, rank);
        EXPECT_EQ(result.grad_norm, norms[step]) << "rank " << rank << ", seed " << seed;
      }
      EXPECT_TRUE(same_params(*on.gpu, *on.engine, expected, model))
          << "rank " << rank << ", seed " << seed;
      on.engine->make_durable();
    });
    expect_good_ends(errors);
  }

  /// One step more of what train() left, on ranks without GPUs.
  void go_on(const ScratchDirectory& directory) const {
    const World& world = GetParam();
    const ModelSpec model = model_of(world);
    PlainTraining expected = plain_of(world);
    for (std::uint64_t step = 0; step <= kSteps; ++step) expected.step(step, kLearningRate);
    const auto runtimes = connected_runtimes(world.ranks, /*threads=*/1);
    const auto errors = run_ranks(world.ranks, [&](int rank) {
      RankRig cpu(*runtimes[static_cast<std::size_t>(rank)], model, config_of(world, directory));
      EXPECT_EQ(cpu.engine->generation(), kSteps);
      train_step(*cpu.engine, model, kSteps, kLearningRate, {}, 1.0F, rank);
      EXPECT_TRUE(testing::same_params(*cpu.engine, expected, model)) << "rank " << rank;
      cpu.engine->make_durable();  // another group may still gather what it compares
    });
    expect_good_ends(errors);
  }
};

TEST_P(EngineCudaRanks, GiveTheBitsOfPlainArrays) {
  const std::uint64_t seeds = number_of("ZIGGURAT_SEEDS", GetParam().ranks == 2 ? 2 : 1);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const ScratchDirectory directory;
    train(directory, seed);
    EXPECT_THAT(cuda_double::report(), IsEmpty()) << "seed " << seed;
    go_on(directory);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineCudaRanks,
    ::testing::Values(
        World{.name = "Stage0", .stage = 0}, World{.name = "Stage1", .stage = 1},
        World{.name = "Stage2", .stage = 2}, World{.name = "Stage3", .stage = 3},
        World{.name = "Stage0OneTileBucketsAllHost",
              .stage = 0,
              .placement = "all=host",
              .bucket_elements = 1},
        World{.name = "Stage2AllNvmeUnclipped", .placement = "all=nvme", .clip_norm = 0},
        World{.name = "Stage3AllNvmeOneTilePieces",
              .stage = 3,
              .placement = "all=nvme",
              .bucket_elements = 1},
        World{.name = "Stage1AllDevice", .stage = 1, .placement = "all=device"},
        World{.name = "Stage2Divided",
              .placement = "all=device,optimizer=device:768KiB,host:256KiB,nvme"},
        World{.name = "Stage3AllDeviceOneTilePieces",
              .stage = 3,
              .placement = "all=device",
              .bucket_elements = 1},
        World{.name = "Stage3Divided",
              .stage = 3,
              .placement = "params=device,grads=host,optimizer=device:512KiB,nvme"},
        World{.name = "Stage2Fp16SummedInFp32",
              .dtype = DType::kFloat16,
              .reduce_dtype = DType::kFloat32},
        World{.name = "Stage0OfThreeFp32SentInBf16",
              .stage = 0,
              .ranks = 3,
              .dtype = DType::kFloat32,
              .reduce_dtype = DType::kBFloat16},
        World{.name = "TwoGroupsOfTwoStage3", .stage = 3, .ranks = 4, .shard_group = 2},
        World{.name = "TwoNodesOfTwoOneTilePieces",
              .stage = 3,
              .ranks = 4,
              .bucket_elements = 1,
              .node_ranks = 2},
        World{.name = "QuantizedWeightsOneTilePieces",
              .stage = 3,
              .ranks = 4,
              .bucket_elements = 1,
              .quantization = {.weights = true},
              .ranks_per_node = 2},
        World{.name = "QuantizedWeightsKeptByNodes",
              .stage = 3,
              .ranks = 4,
              .node_ranks = 2,
              .quantization = {.weights = true},
              .ranks_per_node = 2},
        World{.name = "Gradients8BitWithinANode",
              .stage = 3,
              .quantization = {.gradient_bits = 8},
              .ranks_per_node = 2},
        World{.name = "Gradients4BitOneTileBucketsOfTwoNodes",
              .stage = 3,
              .ranks = 4,
              .bucket_elements = 1,
              .quantization = {.weights = true, .gradient_bits = 4},
              .ranks_per_node = 2}),
    [](const auto& world) { return std::string(world.param.name); });

// A rank that gathers in pieces, and one that gathers at once.
TEST(EngineCudaRanks, OfStage3AllHaveGpusOrNone) {
  const World world{.name = "", .stage = 3};
  const ScratchDirectory directory;
  cuda_double::reset(1);
  const auto runtimes = connected_runtimes(world.ranks, /*threads=*/1);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    if (rank == 0)
      GpuRank on(runtime, 0, small_model(), config_of(world, directory));
    else
      RankRig on(runtime, small_model(), config_of(world, directory));
  });
  for (const std::exception_ptr& thrown : errors) {
    const Error error = error_in(thrown);
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("whether the device is a GPU"));
  }
}

/// Two ranks, of which the first has a GPU, and the second where `gpus` is 2; all are lost at the
/// n-th call from the first rank's second step on. What each said, and the newest generation that
/// it saw durable.
struct Loss {
  std::vector<std::string> said{"", ""};
  std::vector<std::uint64_t> durable{0, 0};
};

Loss lose(const World& world, int gpus, const ScratchDirectory& directory, std::uint64_t n) {
  const ModelSpec model = small_model();
  Loss loss;
  cuda_double::reset(n, {.devices = gpus});
  const auto runtimes = connected_runtimes(2, /*threads=*/1);
  const auto errors = run_ranks(2, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    std::uint64_t& durable = loss.durable[static_cast<std::size_t>(rank)];
    if (rank >= gpus) {
      RankRig cpu(runtime, model, config_of(world, directory));
      for (std::uint64_t step = 0; step < 3; ++step) {
        train_step(*cpu.engine, model, step, kLearningRate, {}, 1.0F, rank);
        durable = cpu.engine->durable_generation();
      }
      return;
    }
    GpuRank on(runtime, rank, model, config_of(world, directory));
    for (std::uint64_t step = 0; step < 3; ++step) {
      if (rank == 0 && step == 1) cuda_double::fail_call(n, cudaErrorLaunchFailure);
      train_on(*on.gpu, *on.engine, model, step, kLearningRate, rank);
      durable = on.engine->durable_generation();
    }
  });
  for (std::size_t rank = 0; rank < 2; ++rank)
    if (errors[rank]) loss.said[rank] = error_in(errors[rank]).what();
  return loss;
}

/// All ranks open at one generation, with its bits.
std::uint64_t resumed_at(const World& world, const ScratchDirectory& directory) {
  const ModelSpec model = small_model();
  const auto runtimes = connected_runtimes(2, /*threads=*/1);
  std::uint64_t generation = 0;
  const auto errors = run_ranks(2, [&](int rank) {
    RankRig cpu(*runtimes[static_cast<std::size_t>(rank)], model, config_of(world, directory));
    PlainTraining plain = plain_of(world);
    for (std::uint64_t step = 0; step < cpu.engine->generation(); ++step)
      plain.step(step, kLearningRate);
    EXPECT_TRUE(testing::same_params(*cpu.engine, plain, model)) << "rank " << rank;
    cpu.engine->make_durable();
    if (rank == 0) generation = cpu.engine->generation();
  });
  expect_good_ends(errors);
  return generation;
}

TEST(EngineCudaRanks, AGpuLostByOneRankEndsTheRunOfAllAndNothingElse) {
  const World world{.name = "", .stage = 2};
  std::uint64_t lost = 0;
  for (std::uint64_t n = 1; n <= 241; n += 20) {
    const ScratchDirectory directory;
    const Loss loss = lose(world, /*gpus=*/1, directory, n);
    if (!loss.said[0].empty()) {
      ++lost;
      EXPECT_THAT(loss.said[0], AllOf(HasSubstr("cuda0"), HasSubstr("cudaErrorLaunchFailure")))
          << n;
    }
    // It may have been done before. A trainer whose own call failed closes its engine.
    const bool engine_knew = loss.said[0].find("the trainer") == std::string::npos;
    EXPECT_THAT(loss.said[1],
                AnyOf(IsEmpty(), AllOf(HasSubstr("rank 0"), HasSubstr(engine_knew ? "cuda0" : ""))))
        << n;
    EXPECT_GE(resumed_at(world, directory), std::max(loss.durable[0], loss.durable[1])) << n;
  }
  EXPECT_GE(lost, 3U);
}

// Units are gathered for what is lost at any call. Each rank names its GPU, or the rank that was
// faster to find out.
TEST(EngineCudaRanks, GpusLostInStage3EndTheRunOfAllAndNothingElse) {
  const World world{.name = "", .stage = 3, .bucket_elements = 1};
  std::uint64_t lost = 0;
  for (std::uint64_t n = 1; n <= 601; n += 60) {
    const ScratchDirectory directory;
    const Loss loss = lose(world, /*gpus=*/2, directory, n);
    lost += loss.said[0].empty() ? 0 : 1;
    for (const std::string& said : loss.said)
      EXPECT_THAT(said, AnyOf(IsEmpty(), HasSubstr("cuda"), HasSubstr("rank "))) << n;
    EXPECT_GE(resumed_at(world, directory), std::max(loss.durable[0], loss.durable[1])) << n;
  }
  EXPECT_GE(lost, 3U);
}

}  // namespace engine_cuda_ranks_test
}  // namespace ziggurat::testing
