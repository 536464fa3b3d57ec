// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_faults_test.cc: three steps of an engine on a GPU, from open to close,
// with an error at each CUDA call in turn, and the GPU lost at each call and each completion: a
// clear error, no hang, nothing against the documentation, and a store that opens at a generation
// that was durable, with the bits of plain arrays.
//
// ZIGGURAT_FAULTS: how many of each kind are tried (16); "all" tries every one.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <string>

#include "tests/core/cuda_rig.h"
#include "tests/core/gpu_faults.h"
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/optimizer_twins.h"

namespace ziggurat::testing {
namespace {

constexpr std::uint64_t kSteps = 3;

/// One case, in its process.
class Case {
 public:
  Case(const ModelSpec& model, const GpuSettings& settings, const PlainRun& plain)
      : model_(model), settings_(settings), plain_(plain) {}

  FaultOutcome run(const GpuFault& fault) {
    const ScratchDirectory directory;
    const EngineConfig config = settings_.config(directory.path());
    fault.arm();
    train(config);
    its_.look(fault);
    resume(config);
    return its_;
  }

 private:
  void train(const EngineConfig& config) {
    std::unique_ptr<GpuRig> rig;
    try {
      rig = std::make_unique<GpuRig>(model_, config);
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        const StepResult result = train_on(*rig->gpu, *rig->engine, model_, step, settings_);
        its_.expect(result.grad_norm == plain_.norms[step],
                    fmt::format("the norm of step {}", step));
        its_.durable = rig->engine->durable_generation();
      }
      rig->engine->make_durable();
      its_.durable = kSteps;
    } catch (const TrainerError& error) {
      ask(rig.get());
    } catch (const Error& error) {
      its_.error = error.what();
    }
  }
  /// The trainer's own call failed; the engine may have something to say of it too.
  void ask(GpuRig* rig) {
    if (rig == nullptr || !rig->engine) return;
    try {
      rig->engine->acquire(0);
      rig->engine->release(0);
      its_.durable = rig->engine->durable_generation();
    } catch (const Error& error) {
      its_.error = error.what();
    }
  }
  /// On the CPU, as if the GPU were gone.
  void resume(const EngineConfig& config) {
    Rig cpu(model_, config);
    its_.resumed = cpu.engine->generation();
    its_.expect(
        its_.resumed >= its_.durable,
        fmt::format("generation {} was durable, and {} is there", its_.durable, its_.resumed));
    its_.expect(its_.resumed <= kSteps, "a generation that was never made");
    if (its_.resumed > kSteps) return;
    its_.expect(testing::same_params(*cpu.engine, plain_.at[its_.resumed], model_),
                fmt::format("wrong bits of generation {}", its_.resumed));
  }

  const ModelSpec& model_;
  const GpuSettings& settings_;
  const PlainRun& plain_;
  FaultOutcome its_;
};

class EngineCudaFaults : public ::testing::TestWithParam<GpuSettings> {
 protected:
  const ModelSpec model_ = small_model();
  const PlainRun plain_{model_, GetParam(), kSteps};
};

TEST_P(EngineCudaFaults, AtEachCallAndCompletionEndTheRunAndNothingElse) {
  const FaultCampaign campaign(GetParam().name, 16, [&](const GpuFault& fault) {
    cuda_double::add_optimizer_twins();
    cuda_double::run_programs(cuda_double::Programs::kTwins);
    return Case(model_, GetParam(), plain_).run(fault);
  });
  const FaultOutcome healthy = campaign.run({FaultAt::kNowhere, 0, cudaSuccess});
  EXPECT_THAT(healthy.problems, ::testing::IsEmpty());
  EXPECT_EQ(healthy.error, "");
  ASSERT_EQ(healthy.resumed, kSteps);
  EXPECT_GT(healthy.calls, 200U);
  EXPECT_GT(healthy.completions, 100U);
  campaign.fail_everywhere(healthy);
}

INSTANTIATE_TEST_SUITE_P(
    Runs, EngineCudaFaults,
    ::testing::Values(
        GpuSettings{.name = "StateOnDrive", .placement = "params=host,grads=host,optimizer=nvme"},
        GpuSettings{.name = "AllOnDrive", .placement = "params=nvme,grads=nvme,optimizer=nvme"},
        GpuSettings{.name = "Mixed", .placement = "params=nvme,grads=host,optimizer=host"},
        GpuSettings{.name = "AllOnGpu", .placement = "all=device"},
        GpuSettings{.name = "Divided", .placement = "optimizer=device:1MiB,host:512KiB,nvme"}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace ziggurat::testing
