// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_test.cc: an engine on a GPU, over the double of the CUDA runtime: the bits
// of plain arrays, whatever order the double runs its streams in; and what becomes of a run whose
// GPU is lost. ZIGGURAT_SEEDS: orders of streams that each placement is tried with (5).
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tests/core/gpu_harness.h"
#include "tests/cuda_double/cuda_double.h"
#include "tiers/cuda_device.h"

namespace ziggurat::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;

/// A runtime, a GPU and an engine over them. The double is a fresh machine.
struct GpuRig {
  GpuRig(const ModelSpec& model, const EngineConfig& config, std::uint64_t seed)
      : runtime((cuda_double::reset(seed), Runtime::create({.threads = 2, .trace_path = ""}))),
        device(CudaDevice::create(runtime->reactor, {.capacity_bytes = 6 * kMiB,
                                                     .trace = runtime->trace.get(),
                                                     .metrics = &runtime->metrics})),
        gpu(std::make_unique<Gpu>(kMiB)),
        engine(Engine::open(model, config, *runtime, *device, initialize)) {}
  /// Closes, and says what was done against the documentation or left behind.
  std::vector<std::string> close() {
    engine.reset();
    gpu.reset();
    device.reset();
    runtime.reset();
    return cuda_double::report();
  }

  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<Gpu> gpu;
  std::unique_ptr<Engine> engine;
};

class EngineCuda : public ::testing::TestWithParam<const char*> {};

TEST_P(EngineCuda, TrainsWithTheBitsOfPlainArrays) {
  const ModelSpec model = small_model();
  const std::uint64_t seeds = seeds_wanted(5);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const ScratchDirectory directory;
    EngineConfig config = small_config(directory.path());
    config.placement = parse_placement(GetParam());
    PlainTraining plain(model, config.clip_norm);
    GpuRig rig(model, config, seed);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const StepResult result = train_on(*rig.gpu, *rig.engine, model, step, kLearningRate);
      EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate)) << "seed " << seed;
    }
    EXPECT_TRUE(same_params(*rig.gpu, *rig.engine, plain, model)) << "seed " << seed;
    rig.engine->make_durable();
    EXPECT_THAT(rig.close(), ::testing::IsEmpty()) << "seed " << seed;

    // The store is one that the CPU goes on from.
    Rig cpu(model, config);
    EXPECT_EQ(cpu.engine->generation(), 3U);
    train_step(*cpu.engine, model, 3, kLearningRate);
    plain.step(3, kLearningRate);
    EXPECT_TRUE(testing::same_params(*cpu.engine, plain, model)) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, EngineCuda,
                         ::testing::Values("params=host,grads=host,optimizer=nvme",
                                           "params=nvme,grads=nvme,optimizer=nvme", "all=host",
                                           "params=nvme,grads=host,optimizer=host",
                                           // State that stays on the GPU.
                                           "params=device,grads=host,optimizer=nvme",
                                           "params=host,grads=device,optimizer=host",
                                           "params=device,grads=device,optimizer=nvme",
                                           "all=device", "params=host,grads=host,optimizer=device",
                                           "params=nvme,grads=nvme,optimizer=device",
                                           // Divided.
                                           "optimizer=device:1MiB,nvme",
                                           "optimizer=device:1MiB,host:512KiB,nvme",
                                           "all=nvme,optimizer=device:1MiB,nvme",
                                           "all=device,optimizer=device:1MiB,host"));

/// Lost at its n-th call or completion: the step ends with an error that names the GPU, and the
/// store opens at a generation that was durable.
TEST(EngineCuda, ALostGpuEndsTheRunAndNothingElse) {
  const ModelSpec model = small_model();
  std::uint64_t lost = 0;
  for (std::uint64_t n = 1; n <= 301; n += 20) {
    const ScratchDirectory directory;
    const EngineConfig config = small_config(directory.path());
    std::string said;
    std::uint64_t durable = 0;
    {
      GpuRig rig(model, config, n);
      train_on(*rig.gpu, *rig.engine, model, 0, kLearningRate);
      rig.engine->make_durable();
      cuda_double::fail_call(n, cudaErrorLaunchFailure);
      try {
        for (std::uint64_t step = 1; step < 3; ++step) {
          train_on(*rig.gpu, *rig.engine, model, step, kLearningRate);
          durable = rig.engine->durable_generation();
        }
      } catch (const Error& error) {
        said = error.what();
      }
    }
    if (!said.empty()) {
      ++lost;
      EXPECT_THAT(said, AllOf(HasSubstr("cuda0"), HasSubstr("cudaErrorLaunchFailure"))) << n;
    }
    Rig cpu(model, config);
    const std::uint64_t resumed = cpu.engine->generation();
    EXPECT_GE(resumed, std::max<std::uint64_t>(durable, 1)) << n;
    PlainTraining plain(model, config.clip_norm);
    for (std::uint64_t step = 0; step < resumed; ++step) plain.step(step, kLearningRate);
    EXPECT_TRUE(testing::same_params(*cpu.engine, plain, model)) << n;
  }
  EXPECT_GE(lost, 3U);
}

}  // namespace
}  // namespace ziggurat::testing
