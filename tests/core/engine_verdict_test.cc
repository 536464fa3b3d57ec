// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_verdict_test.cc: what a step has not earned leaves no trace: a step that is bad
// or refused is undone on every rank, wherever the state lives and whether or not updates had
// started; nothing half-updated is read, written or resumed; and where a step can be neither made
// nor undone, the engine says so at every call.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cerrno>
#include <limits>
#include <thread>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_verdict_test {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr std::uint64_t kGoodSteps = 2;
/// The small model's gradient has a norm of about 11: nothing is clipped, and guesses are right.
constexpr float kLooseClip = 1e6F;

struct Where {
  const char* name;
  const char* placement;
  float clip_norm;
  int slots = 2;
  int ranks = 1;
  int stage = 2;
};
void PrintTo(const Where& where, std::ostream* out) { *out << where.name; }

enum class Bad : std::uint8_t {
  kNotANumber,   // in rank 0's gradient
  kUnannounced,  // a learning rate of step(): not what was announced
  kBetas,        // that make no step
  kLossScale,    // zero
  kBlob,         // a byte too large
};
constexpr Bad kEveryBad[] = {Bad::kNotANumber, Bad::kUnannounced, Bad::kBetas, Bad::kLossScale,
                             Bad::kBlob};

/// What `rank`'s error must say of `bad` that rank 0 brought.
std::string words_of(Bad bad, int rank) {
  switch (bad) {
    case Bad::kNotANumber: return "norm is";
    case Bad::kUnannounced: return rank == 0 ? "prepare_step() announced" : "prepare_step()";
    case Bad::kBetas: return "betas";
    case Bad::kLossScale: return "loss scale";
    case Bad::kBlob: return rank == 0 ? "65536" : "blob";
  }
  return {};
}

/// A step that `bad` spoils on rank 0, with every update that could start under way or done.
void spoiled_step(Engine& engine, const ModelSpec& model, std::uint64_t step, Bad bad, int rank) {
  const bool here = rank == 0;
  StepOptions options{.learning_rate = kLearningRate, .blob = {}};
  if (here && bad == Bad::kBetas) options.betas = Betas{.beta1 = 1.5, .beta2 = 0.9};
  if (here && bad == Bad::kLossScale) options.loss_scale = 0.0F;
  engine.prepare_step(options);
  for (auto u = static_cast<UnitId>(model.units.size()); u-- > 0;) {
    const auto params = HostDevice::view(engine.acquire(u));
    const auto gradient = HostDevice::view(engine.gradient(u));
    for (std::size_t i = 0; i < params.count(); ++i)
      gradient[i] += gradient_of(value_at(params, i), u, i, step, rank);
    if (here && bad == Bad::kNotANumber && u == 0)
      gradient[7] = std::numeric_limits<float>::quiet_NaN();
    engine.release(u);
    engine.finish_gradient(u);
  }
  const std::vector<std::byte> blob(kBlobBytesMax + 1);
  if (here && bad == Bad::kBlob) options.blob = blob;
  if (here && bad == Bad::kUnannounced) options.learning_rate = 0.5F;
  engine.step(options);
}

/// Its destructor waits for all ranks.
struct Together {
  std::barrier<>& all;
  ~Together() { all.arrive_and_wait(); }
};

class EngineVerdict : public ::testing::TestWithParam<Where> {
 protected:
  EngineConfig config() const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam().placement);
    config.clip_norm = GetParam().clip_norm;
    config.slots = GetParam().slots;
    config.strategy.zero_stage = GetParam().stage;
    return config;
  }
  PlainTraining plain() const {
    PlainTraining plain(model_, GetParam().clip_norm);
    plain.world_size = GetParam().ranks;
    return plain;
  }
  /// Every rank opens what is in the directory and does `body`.
  void on_all_ranks(const std::function<void(Engine& engine, int rank)>& body) {
    const auto runtimes = connected_runtimes(GetParam().ranks, 2);
    std::barrier<> all_done(GetParam().ranks);
    expect_none(run_ranks(GetParam().ranks, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model_, config());
      const Together leaving{all_done};  // an engine that closes ends what others are still in
      body(*rig.engine, rank);
    }));
  }
  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

TEST_P(EngineVerdict, OfABadStepUndoesItAndTrainingGoesOn) {
  std::vector<PlainTraining> at{plain()};
  while (at.size() <= kGoodSteps + std::size(kEveryBad)) {
    at.push_back(at.back());
    at.back().step(at.size() - 2, kLearningRate);
  }
  const auto expect_undone = [&](Engine& engine, std::uint64_t step, Bad bad, int rank) {
    SCOPED_TRACE(words_of(bad, rank));
    const std::string stands =
        fmt::format("nothing was updated, and generation {} is still current", step);
    try {
      spoiled_step(engine, model_, step, bad, rank);
      ADD_FAILURE() << "rank " << rank << " made it";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(words_of(bad, rank))) << "rank " << rank;
      EXPECT_THAT(error.what(), HasSubstr(stands));
    }
    EXPECT_EQ(engine.generation(), step);
    EXPECT_TRUE(same_params(engine, at[step], model_)) << "rank " << rank;
    engine.make_durable();
    EXPECT_EQ(engine.durable_generation(), step);
    for (UnitId u = 0; u < model_.units.size() && GetParam().ranks == 1; ++u)
      EXPECT_EQ(master_of(engine, u), at[step].master(u)) << "unit " << u;
  };
  on_all_ranks([&](Engine& engine, int rank) {
    for (std::uint64_t step = 0; step < kGoodSteps; ++step)
      train_step(engine, model_, step, kLearningRate, {}, 1.0F, rank);
    for (const Bad bad : kEveryBad) expect_undone(engine, kGoodSteps, bad, rank);
  });
  // What was made durable after them is the old generation; and steps made well give the bits of a
  // run that never saw the bad ones.
  on_all_ranks([&](Engine& engine, int rank) {
    std::uint64_t step = kGoodSteps;
    EXPECT_EQ(engine.generation(), step);
    for (const Bad bad : kEveryBad) {
      expect_undone(engine, step, bad, rank);
      train_step(engine, model_, step, kLearningRate, {}, 1.0F, rank);
      EXPECT_TRUE(same_params(engine, at[++step], model_)) << "rank " << rank;
    }
    engine.make_durable();
  });
  on_all_ranks([&](Engine& engine, int rank) {
    EXPECT_EQ(engine.generation(), at.size() - 1);
    EXPECT_TRUE(same_params(engine, at.back(), model_)) << "rank " << rank;
    engine.make_durable();
  });
}

// The engine is closed in mid-step right after it, as by a kill; or the step is ended.
TEST_P(EngineVerdict, IsNotWaitedForByMakeDurableInMidBackward) {
  PlainTraining before = plain();
  for (std::uint64_t step = 0; step < kGoodSteps; ++step) before.step(step, kLearningRate);
  PlainTraining after = before;
  after.step(kGoodSteps, kLearningRate);
  for (const UnitId last : {0U, 1U, 3U}) {
    SCOPED_TRACE(fmt::format("down to unit {}", last));
    const bool ends = last == 0;
    const PlainTraining& expected = ends ? after : before;
    std::filesystem::remove_all(directory_.path());
    std::filesystem::create_directory(directory_.path());
    on_all_ranks([&](Engine& engine, int rank) {
      for (std::uint64_t step = 0; step < kGoodSteps; ++step)
        train_step(engine, model_, step, kLearningRate, {}, 1.0F, rank);
      pass_step(engine, model_, kGoodSteps, kLearningRate, 1.0F, last, rank);
      engine.make_durable();
      EXPECT_EQ(engine.durable_generation(), kGoodSteps);
      if (!ends) return;
      engine.step({.learning_rate = kLearningRate, .blob = {}});
      engine.make_durable();
    });
    on_all_ranks([&](Engine& engine, int rank) {
      EXPECT_EQ(engine.generation(), kGoodSteps + (ends ? 1 : 0));
      EXPECT_TRUE(same_params(engine, expected, model_)) << "rank " << rank;
      engine.make_durable();
    });
  }
}

constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";
constexpr const char* kOnDevice = "params=device,grads=device,optimizer=nvme";

INSTANTIATE_TEST_SUITE_P(
    Engine, EngineVerdict,
    ::testing::Values(Where{"Demo", kDemo, 1.0F}, Where{"DemoGuessesRight", kDemo, kLooseClip},
                      Where{"DemoUnclipped", kDemo, 0.0F}, Where{"OneSlot", kDemo, 1.0F, 1},
                      Where{"OneSlotUnclipped", kDemo, 0.0F, 1}, Where{"AllHost", "all=host", 1.0F},
                      Where{"AllHostUnclipped", "all=host", 0.0F},
                      Where{"AllHostOneSlotUnclipped", "all=host", 0.0F, 1},
                      Where{"AllDeviceUnclipped", "all=device", 0.0F},
                      Where{"AllNvmeUnclipped", "all=nvme", 0.0F},
                      Where{"OnDeviceUnclipped", kOnDevice, 0.0F},
                      Where{"TwoRanks", kDemo, 1.0F, 2, 2},
                      Where{"TwoRanksUnclipped", kDemo, 0.0F, 2, 2},
                      Where{"TwoRanksStage0Unclipped", kDemo, 0.0F, 2, 2, 0},
                      Where{"TwoRanksStage3Unclipped", kDemo, 0.0F, 2, 2, 3},
                      Where{"TwoRanksAllNvmeUnclipped", "all=nvme", 0.0F, 2, 2, 3},
                      Where{"TwoRanksOneSlotUnclipped", kDemo, 0.0F, 1, 2},
                      Where{"TwoRanksAllHostUnclipped", "all=host", 0.0F, 2, 2}),
    [](const auto& one) { return std::string(one.param.name); });

// What differs is found by all, and undone by all.
TEST(EngineVerdictRanks, OfAStepWithTwoLearningRatesIsThatNobodyMakesIt) {
  for (const char* placement : {kDemo, "all=nvme", "all=host"}) {
    const ScratchDirectory directory;
    const ModelSpec model = small_model();
    EngineConfig config = small_config(directory.path());
    config.placement = parse_placement(placement);
    config.clip_norm = 0;
    PlainTraining expected(model, config.clip_norm);
    expected.world_size = 2;
    for (std::uint64_t step = 0; step < 3; ++step) expected.step(step, kLearningRate);
    const auto runtimes = connected_runtimes(2, 2);
    std::barrier<> all_done(2);
    expect_none(run_ranks(2, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
      const Together leaving{all_done};
      for (std::uint64_t step = 0; step < 3; ++step) {
        const float other = kLearningRate * static_cast<float>(1 + rank);
        try {
          train_step(*rig.engine, model, step, other, {}, 1.0F, rank);
          ADD_FAILURE() << "rank " << rank << " made it";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_THAT(error.what(), HasSubstr("another learning rate"));
        }
        train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
      }
      EXPECT_TRUE(same_params(*rig.engine, expected, model)) << placement << " rank " << rank;
      rig.engine->make_durable();
    }));
  }
}

/// An engine on a drive that can be made to fail.
struct FragileRig {
  FragileRig(const ModelSpec& model, const EngineConfig& config) {
    RuntimeOptions options{.threads = 2, .trace_path = ""};
    options.io_engine = [this](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      drive = faulty.get();
      return faulty;
    };
    runtime = Runtime::create(options);
    device = HostDevice::create(runtime->reactor, 8 * kMiB, nullptr, &runtime->metrics);
    engine = Engine::open(model, config, *runtime, *device, initialize);
  }
  void fail_reads_from_now_on() {
    runtime->reactor.block_on([](FaultyEngine& its) -> Task<> {
      its.plan(Fault::fail(FaultPoint::kRead, EIO).at(its.calls(FaultPoint::kRead)).from_then_on());
      co_return;
    }(*drive));
  }

  FaultyEngine* drive = nullptr;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

TEST(EngineVerdictFailure, ToUndoAStepIsSaidByEveryCallAndTheDurableGenerationIsResumed) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.host_budget_bytes = 2 * kMiB;  // no record is kept in host memory
  config.clip_norm = 0;
  PlainTraining plain(model, config.clip_norm);
  {
    FragileRig rig(model, config);
    train_step(*rig.engine, model, 0, kLearningRate);
    plain.step(0, kLearningRate);
    rig.engine->make_durable();
    const Metrics& metrics = rig.engine->metrics();
    const std::uint64_t written = metrics.value(Counter::kStateWriteBytes);
    pass_step(*rig.engine, model, 1, kLearningRate,
              std::numeric_limits<float>::quiet_NaN());  // every gradient
    // Until every record of the guess is written: none is read any more but to be taken back.
    while (metrics.value(Counter::kStateWriteBytes) < 2 * written) std::this_thread::yield();
    rig.fail_reads_from_now_on();
    const auto expect_said = [](const char* call, const std::function<void()>& action) {
      try {
        action();
        ADD_FAILURE() << call << " gave something out";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("could not be undone")) << call;
        EXPECT_THAT(error.what(), HasSubstr("Generation 1 is undamaged in")) << call;
        EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("nothing was updated"))) << call;
      }
    };
    const StepOptions options{.learning_rate = kLearningRate, .blob = {}};
    Engine& engine = *rig.engine;
    expect_said("step", [&] { engine.step(options); });
    expect_said("step again", [&] { engine.step(options); });
    expect_said("acquire", [&] { engine.acquire(0); });
    expect_said("gradient", [&] { engine.gradient(0); });
    expect_said("prepare_step", [&] { engine.prepare_step(options); });
    expect_said("read_master", [&] { engine.read_master(0, 0); });
    expect_said("make_durable", [&] { engine.make_durable(); });
  }
  Rig rig(model, config);
  EXPECT_EQ(rig.engine->generation(), 1U);
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
}

TEST(EngineVerdictBlob, OfTheLargestSizeIsStoredAndResumed) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const EngineConfig config = small_config(directory.path());
  std::vector<std::byte> blob(kBlobBytesMax);
  for (std::size_t i = 0; i < blob.size(); ++i) blob[i] = static_cast<std::byte>(i * 7 + i / 256);
  {
    Rig rig(model, config);
    train_step(*rig.engine, model, 0, kLearningRate, blob);
    rig.engine->make_durable();
  }
  const Rig rig(model, config);
  EXPECT_EQ(rig.engine->generation(), 1U);
  EXPECT_TRUE(std::ranges::equal(rig.engine->resumed_blob(), blob));
}

}  // namespace engine_verdict_test
}  // namespace ziggurat::testing
