// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_cuda_faults_test.cc: three steps of an engine that streams parameters to a GPU,
// from open to close, with an error at CUDA calls in turn, and the GPU lost at calls and
// completions: a clear error, no hang, nothing against the documentation, and a store that opens at
// a generation that was durable, with the bits of plain arrays.
//
// ZIGGURAT_FAULTS: how many of each kind are tried (8); "all" tries every one.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "tests/core/gpu_faults.h"
#include "tests/core/streamed_gpu.h"
#include "tiers/device/host_device.h"

namespace ziggurat::testing {
namespace lent_cuda_faults_test {

using enum StateFormat;

constexpr std::uint64_t kSteps = 3;

/// One case, in its process.
class LentCase {
 public:
  explicit LentCase(Tier params) : params_(params) {}

  FaultOutcome run(const GpuFault& fault) {
    const ScratchDirectory directory;
    EngineConfig config = config_of({kFp32, DType::kFloat32}, Where::kNvme, directory);
    config.placement.params = params_;
    fault.arm();
    train(config);
    its_.look(fault);
    resume(config);
    return its_;
  }

 private:
  static LentStep step(std::uint64_t generation) {
    if (generation != 2) return {};
    return {.left_out = {3}, .written = {1, 4}};
  }
  void train(const EngineConfig& config) {
    const std::uint64_t device_bytes = params_ == Tier::kDevice ? 4 * kMiB : 1440 * kKiB;
    StreamedGpu gpu(model_, config, device_bytes);
    try {
      gpu.open();
      for (std::uint64_t generation = 1; generation <= kSteps; ++generation) {
        gpu.engine->expect_units(std::vector<StreamedUnit>{0, 1});
        gpu.step(step(generation));
        gpu.fetch();
        its_.expect(bool(gpu.trainer.same()), fmt::format("the bits of step {}", generation));
        its_.durable = gpu.engine->durable_generation();
      }
      gpu.engine->make_durable();
      its_.durable = kSteps;
    } catch (const TrainerError& error) {
      ask(gpu);
    } catch (const Error& error) {
      its_.error = error.what();
    }
  }
  /// The trainer's own call failed; the engine may have something to say of it too.
  void ask(StreamedGpu& gpu) {
    if (!gpu.engine) return;
    try {
      Host host;
      gpu.engine->acquire(2, host);
      gpu.engine->release(2, host);
      its_.durable = gpu.engine->durable_generation();
    } catch (const Error& error) {
      // The trainer's unit may still be there, and leave no room.
      if (error.code() != ErrorCode::kResourceExhausted) its_.error = error.what();
    }
  }
  /// On the CPU, as if the GPU were gone.
  void resume(EngineConfig config) {
    LentTrainer trainer(model_, config.optimizer.state);
    config.counts_steps = true;
    const auto runtime = runtime_of(1);
    const auto device = HostDevice::create(runtime->reactor, 4 * kMiB);
    const auto engine = LentEngine::open(model_, config, *runtime, trainer.lent(), device.get());
    its_.resumed = engine->generation();
    its_.expect(
        its_.resumed >= its_.durable,
        fmt::format("generation {} was durable, and {} is there", its_.durable, its_.resumed));
    its_.expect(its_.resumed <= kSteps, "a generation that was never made");
    if (its_.resumed > kSteps) return;
    LentTrainer plain(model_, config.optimizer.state);
    for (std::uint64_t generation = 1; generation <= its_.resumed; ++generation)
      plain.plain_step(generation, step(generation));
    for (ParamId p = 0; p < model_.units.size(); ++p) fetch(*engine, p, trainer.params[p]);
    its_.expect(trainer.params == plain.params,
                fmt::format("wrong bits of generation {}", its_.resumed));
  }
  void fetch(LentEngine& engine, ParamId param, TypedArray& values) const {
    const std::optional<StreamedUnit>& unit = model_.units[param].params[0].streamed;
    if (!unit) return;
    Host host;
    engine.acquire(*unit, host);
    std::ranges::copy(HostDevice::view(engine.place(param)).bytes, values.bytes.begin());
    engine.release(*unit, host);
  }

  const ModelSpec model_ = streamed_model(DType::kFloat32);
  Tier params_;
  FaultOutcome its_;
};

class LentCudaFaults : public ::testing::TestWithParam<Tier> {};

INSTANTIATE_TEST_SUITE_P(Params, LentCudaFaults,
                         ::testing::Values(Tier::kDevice, Tier::kHost, Tier::kNvme),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(LentCudaFaults, AtCallsAndCompletionsEndTheRunAndNothingElse) {
  const FaultCampaign campaign(
      fmt::format("params on {}", to_string(GetParam())), 8,
      [](const GpuFault& fault) { return LentCase(GetParam()).run(fault); });
  const FaultOutcome healthy = campaign.run({FaultAt::kNowhere, 0, cudaSuccess});
  EXPECT_THAT(healthy.problems, ::testing::IsEmpty());
  EXPECT_EQ(healthy.error, "");
  ASSERT_EQ(healthy.resumed, kSteps);
  EXPECT_GT(healthy.calls, 100U);
  EXPECT_GT(healthy.completions, 50U);
  campaign.fail_everywhere(healthy);
}

}  // namespace lent_cuda_faults_test
}  // namespace ziggurat::testing
