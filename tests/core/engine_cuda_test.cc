// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_test.cc: an engine on a GPU, over the double of the CUDA runtime: the bits
// of plain arrays, whatever order the double runs its streams in.
//
// ZIGGURAT_SEEDS: orders of streams that each run is tried with (4), of which the first
// ZIGGURAT_PTX_SEEDS (1) interpret the kernels' PTX, and the others run their host twins. Each
// hundredth with parameters on the drive is run twice more with nothing left to chance, and must
// have the same trace.
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>

#include "aio/thread_engine.h"
#include "tests/core/cuda_rig.h"
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/optimizer_twins.h"

namespace ziggurat::testing {
namespace {

using cuda_double::Programs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint64_t kSteps = 3;

class EngineCuda : public ::testing::TestWithParam<GpuSettings> {
 protected:
  static void SetUpTestSuite() { cuda_double::add_optimizer_twins(); }
  static void TearDownTestSuite() { cuda_double::run_programs(Programs::kPtx); }

  void SetUp() override {
    const bool guesses = GetParam().speculation == EngineConfig::Speculation::kAlways;
    const bool on_drive = parse_placement(GetParam().placement).optimizer == Tier::kNvme;
    EXPECT_TRUE(on_drive || !guesses) << "nothing to guess";
  }

  /// Trains over the double as it stands, compares, and closes.
  void train(const std::string& directory, const RuntimeOptions& options) const {
    GpuRig rig(model_, GetParam().config(directory), options);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const StepResult result = train_on(*rig.gpu, *rig.engine, model_, step, GetParam());
      EXPECT_EQ(result.grad_norm, plain_.norms[step]);
    }
    EXPECT_TRUE(same_params(rig, plain_.at[kSteps], model_));
    rig.engine->make_durable();
    EXPECT_THAT(rig.close(), ::testing::IsEmpty());
  }
  /// The store is one that the CPU goes on from.
  void train_on_cpu(const std::string& directory) const {
    Rig cpu(model_, GetParam().config(directory));
    EXPECT_EQ(cpu.engine->generation(), kSteps);
    EXPECT_TRUE(testing::same_params(*cpu.engine, plain_.at[kSteps], model_));
    if (GetParam().loss_scale || GetParam().passes != 1) return;
    PlainTraining plain = plain_.at[kSteps];
    train_step(*cpu.engine, model_, kSteps, GetParam().options().learning_rate);
    plain.step(kSteps, GetParam().options().learning_rate);
    EXPECT_TRUE(testing::same_params(*cpu.engine, plain, model_));
  }
  /// Parameters that are on no drive are loaded ahead by the engine's thread while the trainer's
  /// makes calls of its own, and which comes first is nobody's choice.
  static bool has_one_order() {
    return parse_placement(GetParam().placement).params == Tier::kNvme;
  }
  /// One that is the seed's alone: a thread of each kind, and time goes on when all are idle.
  std::uint64_t trace_of(std::uint64_t seed) const {
    const ScratchDirectory directory;
    cuda_double::reset(seed, {.pace = cuda_double::Pace::kWhenQuiet});
    RuntimeOptions options{.threads = 1, .trace_path = ""};
    options.io_engine = [](Reactor& reactor, const std::string&) {
      return std::make_unique<ThreadEngine>(reactor, 1);
    };
    train(directory.path(), options);
    return cuda_double::trace_hash();
  }

  const ModelSpec model_ = small_model();
  const PlainRun plain_{model_, GetParam(), kSteps};
};

TEST_P(EngineCuda, TrainsWithTheBitsOfPlainArrays) {
  const std::uint64_t seeds = number_of("ZIGGURAT_SEEDS", 4);
  const std::uint64_t interpreted = number_of("ZIGGURAT_PTX_SEEDS", 1);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const ScratchDirectory directory;
    cuda_double::reset(seed);
    cuda_double::run_programs(seed <= interpreted ? Programs::kPtx : Programs::kTwins);
    train(directory.path(), GpuRig::small());
    if (seed % 100 == 1) train_on_cpu(directory.path());
    if (seed % 100 == 0 && has_one_order()) {
      EXPECT_EQ(trace_of(seed), trace_of(seed));
    }
    if (HasFailure()) return;
  }
}

TEST_P(EngineCuda, HasTheSameTraceForTheSameSeed) {
  if (!has_one_order()) GTEST_SKIP() << "two threads call CUDA at a time";
  cuda_double::run_programs(Programs::kTwins);
  const std::uint64_t trace = trace_of(1);
  EXPECT_EQ(trace_of(1), trace);
  EXPECT_NE(trace_of(2), trace);
}

constexpr auto kGuess = EngineConfig::Speculation::kAlways;
constexpr const char* kStateOnDrive = "params=host,grads=host,optimizer=nvme";
constexpr const char* kAllOnDrive = "params=nvme,grads=nvme,optimizer=nvme";
constexpr const char* kMixed = "params=nvme,grads=host,optimizer=host";

INSTANTIATE_TEST_SUITE_P(
    Runs, EngineCuda,
    ::testing::Values(
        GpuSettings{.name = "StateOnDrive", .placement = kStateOnDrive},
        GpuSettings{.name = "AllOnDrive", .placement = kAllOnDrive},
        GpuSettings{.name = "AllInHostMemory", .placement = "all=host"},
        GpuSettings{.name = "Mixed", .placement = kMixed},
        GpuSettings{.name = "WithoutClipping", .placement = kStateOnDrive, .clip_norm = 0},
        GpuSettings{
            .name = "Guesses", .placement = kAllOnDrive, .clip_norm = 1e6F, .speculation = kGuess},
        GpuSettings{.name = "WrongGuesses", .placement = kStateOnDrive, .speculation = kGuess},
        GpuSettings{.name = "TwoPasses", .placement = kAllOnDrive, .passes = 2},
        GpuSettings{.name = "LossScale", .placement = kMixed, .loss_scale = 256.0F},
        // State that stays on the GPU.
        GpuSettings{.name = "ParamsOnGpu", .placement = "params=device,grads=host,optimizer=nvme"},
        GpuSettings{.name = "GradientsOnGpu",
                    .placement = "params=host,grads=device,optimizer=host"},
        GpuSettings{.name = "RecordsOnDrive",
                    .placement = "params=device,grads=device,optimizer=nvme",
                    .speculation = kGuess},
        GpuSettings{.name = "AllOnGpu", .placement = "all=device"},
        GpuSettings{.name = "AllOnGpuTwoPasses", .placement = "all=device", .passes = 2},
        GpuSettings{.name = "RecordsOnGpu", .placement = "params=host,grads=host,optimizer=device"},
        GpuSettings{.name = "RecordsOnGpuOthersOnDrive",
                    .placement = "params=nvme,grads=nvme,optimizer=device",
                    .loss_scale = 256.0F},
        // Divided.
        GpuSettings{.name = "Divided", .placement = "optimizer=device:1MiB,host:512KiB,nvme"},
        GpuSettings{.name = "DividedGuesses",
                    .placement = "optimizer=device:1MiB,host:512KiB,nvme",
                    .clip_norm = 1e6F,
                    .speculation = kGuess},
        GpuSettings{.name = "DividedWrongGuesses",
                    .placement = "all=nvme,optimizer=device:1MiB,nvme",
                    .speculation = kGuess},
        GpuSettings{.name = "DividedInMemory",
                    .placement = "all=device,optimizer=device:1MiB,host"},
        GpuSettings{.name = "Auto", .placement = "auto"}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace ziggurat::testing
