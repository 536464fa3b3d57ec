// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_tensor_test.cc: ranks that divide every layer, each with a GPU, over the
// double of the CUDA runtime: the bits of one set of plain arrays, and the norms of ranks that
// compute on the CPU.
#include <gmock/gmock.h>

#include <barrier>
#include <string>
#include <vector>

#include "tests/core/gpu_harness.h"
#include "tests/core/tensor_rig.h"
#include "tests/cuda_double/cuda_double.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat::testing {
namespace engine_cuda_tensor_test {

constexpr std::uint64_t kSteps = 3;

class GpuBytes final : public DeviceBytes {
 public:
  explicit GpuBytes(int index) : gpu_(kMiB, index) {}
  std::vector<std::byte> read(DeviceSpan<const std::byte> bytes) override {
    return gpu_.read(bytes);
  }
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) override {
    gpu_.write(to, bytes);
  }

 private:
  Gpu gpu_;
};

struct World {
  const char* name;
  int parts = 2;
  int data = 1;
  int stage = 2;
  const char* placement = "params=host,grads=host,optimizer=nvme";
};
void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

EngineConfig config_of(const World& world, const std::string& directory, float clip_norm) {
  EngineConfig config = small_config(directory);
  config.tensor_parallel = world.parts;
  config.strategy.zero_stage = world.stage;
  config.placement = parse_placement(world.placement);
  config.clip_norm = clip_norm;
  return config;
}

struct Ended {
  std::vector<double> norms;  ///< of rank 0
  bool right = true;          ///< every rank has the bits of `plain`
};

/// Trains `world` on GPUs or on the host; compares with `plain` where there is one.
Ended train(const World& world, float clip_norm, bool on_gpus, const PlainTraining* plain) {
  const ScratchDirectory directory;
  const EngineConfig config = config_of(world, directory.path(), clip_norm);
  const int ranks = world.parts * world.data;
  const auto runtimes = connected_runtimes(ranks, 1);
  Ended ended;
  std::vector<char> right(static_cast<std::size_t>(ranks), 1);
  const auto errors = run_ranks(ranks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    std::unique_ptr<Device> device;
    std::unique_ptr<DeviceBytes> bytes;
    if (on_gpus) {
      device = CudaDevice::create(runtime.reactor, {.index = rank, .capacity_bytes = 8 * kMiB});
      bytes = std::make_unique<GpuBytes>(rank);
    } else {
      device = HostDevice::create(runtime.reactor, 8 * kMiB);
      bytes = std::make_unique<HostBytes>();
    }
    PartRig rig(runtime, config, std::move(device), std::move(bytes));
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const double norm = rig.step(step).grad_norm;
      if (rank == 0) ended.norms.push_back(norm);
    }
    if (plain != nullptr) right[static_cast<std::size_t>(rank)] = rig.has_params_of(*plain);
    rig.engine->make_durable();
  });
  expect_none(errors);
  ended.right = std::ranges::count(right, 0) == 0;
  return ended;
}

class EngineCudaTensor : public ::testing::TestWithParam<World> {};

TEST_P(EngineCudaTensor, HasTheBitsOfPlainArraysAndTheNormsOfTheCpu) {
  const World& world = GetParam();
  PlainTraining plain(whole_model(), 0);
  plain.world_size = world.data;
  for (std::uint64_t step = 0; step < kSteps; ++step) plain.step(step, kPartLearningRate);
  const Ended unclipped = train(world, 0, /*on_gpus=*/false, &plain);
  const Ended clipped = train(world, 0.5F, /*on_gpus=*/false, nullptr);
  ASSERT_TRUE(unclipped.right);
  for (std::uint64_t seed = 1; seed <= number_of("ZIGGURAT_SEEDS", 2); ++seed) {
    cuda_double::reset(seed, {.devices = world.parts * world.data});
    const Ended on_gpus = train(world, 0, /*on_gpus=*/true, &plain);
    EXPECT_TRUE(on_gpus.right) << "seed " << seed;
    EXPECT_EQ(on_gpus.norms, unclipped.norms) << "seed " << seed;
    EXPECT_EQ(train(world, 0.5F, /*on_gpus=*/true, nullptr).norms, clipped.norms)
        << "seed " << seed;
    EXPECT_THAT(cuda_double::report(), ::testing::IsEmpty()) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineCudaTensor,
    ::testing::Values(World{.name = "TwoParts"},
                      World{.name = "TwoPartsAllDevice", .placement = "all=device"},
                      World{.name = "TwoPartsAllNvme", .placement = "all=nvme"},
                      World{.name = "TwoPartsOfTwoRanksStage3", .data = 2, .stage = 3}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace engine_cuda_tensor_test
}  // namespace ziggurat::testing
