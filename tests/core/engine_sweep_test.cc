// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_sweep_test.cc: updates that start on a guess, and records kept in host memory,
// move other bytes at other times and change no bit; what they save and waste is counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <thread>

#include "base/error.h"
#include "core/schedule/optimizer/speculation.h"
#include "tests/core/engine_harness.h"
#include "tests/core/equal_units.h"

namespace ziggurat::testing {
namespace engine_sweep_test {

using ::testing::HasSubstr;
using Speculation = EngineConfig::Speculation;

constexpr float kLearningRate = 0.01F;
/// The small model's gradient has a norm of about 11; a loud step's four times that.
constexpr float kClip = 20.0F;
constexpr std::uint64_t kRecordsBytes = 12 * 12 * kTileElements;  // twelve tiles

/// Five units of eight tiles each: enough chunks for some of them to be kept.
ModelSpec wide_model() { return equal_units("wide", 5, 1000); }
constexpr float kWideClip = 45.0F;  // norms of about 23, and four times that
constexpr std::uint64_t kWideRecordsBytes = 40 * 12 * kTileElements;

float loudness_of(std::uint64_t step) { return step % 3 == 1 ? 4.0F : 1.0F; }

struct SweepCase {
  const char* name;
  const char* placement;
  std::uint64_t host_bytes;
  std::size_t threads;
  Speculation speculation;
  bool wide = false;
  StateFormat format = StateFormat::kFp32;
};

class EverySweep : public ::testing::TestWithParam<SweepCase> {};

TEST_P(EverySweep, GivesTheBitsOfPlainArraysWhereAThirdOfTheStepsClips) {
  const ScratchDirectory directory;
  const ModelSpec model = GetParam().wide ? wide_model() : small_model();
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(GetParam().placement);
  config.host_budget_bytes = GetParam().host_bytes;
  config.clip_norm = GetParam().wide ? kWideClip : kClip;
  config.speculation = GetParam().speculation;
  config.optimizer.state.format = GetParam().format;
  PlainTraining plain(model, config.clip_norm, config.optimizer.state);
  Rig rig(model, config, GetParam().threads, 8 * kMiB);
  SpeculationWatch watch;
  std::uint64_t guesses = 0;
  std::uint64_t redone = 0;
  for (std::uint64_t step = 0; step < 12; ++step) {
    const bool loud = loudness_of(step) > 1;
    const bool guess = GetParam().speculation == Speculation::kAlways ||
                       (GetParam().speculation == Speculation::kAuto && watch.worth_it());
    watch.observe(!loud);
    guesses += guess ? 1 : 0;
    redone += guess && loud ? 1 : 0;
    const StepResult result =
        train_step(*rig.engine, model, step, kLearningRate, {}, loudness_of(step));
    ASSERT_EQ(result.grad_norm, plain.step(step, kLearningRate, loudness_of(step)));
    ASSERT_EQ(result.clipped, loud);
    if (step % 4 == 3) {
      ASSERT_TRUE(same_params(*rig.engine, plain, model)) << "step " << step;
    }
  }
  rig.engine->make_durable();
  EXPECT_EQ(rig.engine->durable_generation(), 12U);
  const Metrics& metrics = rig.engine->metrics();
  EXPECT_EQ(metrics.value(Counter::kSpeculations), guesses);
  EXPECT_EQ(metrics.value(Counter::kSpeculationsRedone), redone);
  const std::uint64_t records_bytes = GetParam().wide ? kWideRecordsBytes : kRecordsBytes;
  EXPECT_LE(metrics.value(Counter::kSpeculationWasteBytes), 2 * records_bytes * redone);
}

constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";
constexpr const char* kOnDevice = "params=device,grads=device,optimizer=nvme";
constexpr const char* kDivided = "params=host,grads=host,optimizer=device:2MiB,host:1MiB,nvme";

INSTANTIATE_TEST_SUITE_P(
    Engine, EverySweep,
    ::testing::Values(SweepCase{"Never", kDemo, 2 * kMiB, 2, Speculation::kNever},
                      SweepCase{"Auto", kDemo, 2 * kMiB, 2, Speculation::kAuto},
                      SweepCase{"AutoAllKept", kDemo, 8 * kMiB, 2, Speculation::kAuto},
                      SweepCase{"Always", kDemo, 2 * kMiB, 2, Speculation::kAlways},
                      SweepCase{"NeverSomeKept", kDemo, 8 * kMiB, 2, Speculation::kNever, true},
                      SweepCase{"AlwaysSomeKept", kDemo, 8 * kMiB, 2, Speculation::kAlways, true},
                      SweepCase{"AlwaysSmallest", kDemo, 4 * kMiB, 2, Speculation::kAlways, true},
                      SweepCase{"AlwaysSomeKeptSplit", kDemo, 8 * kMiB, 2, Speculation::kAlways,
                                true, StateFormat::kSplit},
                      SweepCase{"AlwaysSomeKeptEightBit", kDemo, 6 * kMiB, 2, Speculation::kAlways,
                                true, StateFormat::k8Bit},
                      SweepCase{"AlwaysAllKept", kDemo, 8 * kMiB, 2, Speculation::kAlways},
                      SweepCase{"AlwaysOneThread", kDemo, 2 * kMiB, 1, Speculation::kAlways},
                      SweepCase{"AlwaysNvme", "all=nvme", 2 * kMiB, 2, Speculation::kAlways},
                      SweepCase{"AlwaysNvmeKept", "all=nvme", 8 * kMiB, 1, Speculation::kAlways},
                      SweepCase{"AlwaysDevice", kOnDevice, 2 * kMiB, 2, Speculation::kAlways},
                      SweepCase{"AlwaysDeviceKept", kOnDevice, 8 * kMiB, 2, Speculation::kAlways},
                      SweepCase{"NeverDivided", kDivided, 4 * kMiB, 2, Speculation::kNever, true},
                      SweepCase{"AlwaysDivided", kDivided, 4 * kMiB, 2, Speculation::kAlways, true},
                      SweepCase{"AlwaysDividedSplit", kDivided, 8 * kMiB, 2, Speculation::kAlways,
                                true, StateFormat::kSplit},
                      SweepCase{"AlwaysFirstOnDevice", "all=nvme,optimizer=device:3MiB,nvme",
                                2 * kMiB, 2, Speculation::kAlways, true}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(EngineSpeculation, AStepLeftInTheMidstOfItsGuessIsForgotten) {
  for (const std::uint64_t host_bytes : {2 * kMiB, 8 * kMiB}) {
    const ScratchDirectory directory;
    const ModelSpec model = small_model();
    EngineConfig config = small_config(directory.path());
    config.host_budget_bytes = host_bytes;
    config.clip_norm = kClip;
    config.speculation = Speculation::kAlways;
    PlainTraining plain(model, kClip);
    for (std::uint64_t step = 0; step < 6; ++step) {
      {
        Rig rig(model, config);
        ASSERT_EQ(rig.engine->generation(), step);
        const std::uint64_t at_open = rig.engine->metrics().value(Counter::kNvmeWriteBytes);
        pass_step(*rig.engine, model, step, kLearningRate, loudness_of(step), step % 3);
        // Something of the next generation is written.
        const Metrics& metrics = rig.engine->metrics();
        while (metrics.value(Counter::kNvmeWriteBytes) == at_open) std::this_thread::yield();
      }
      Rig rig(model, config);
      ASSERT_EQ(rig.engine->generation(), step);
      ASSERT_TRUE(same_params(*rig.engine, plain, model));
      train_step(*rig.engine, model, step, kLearningRate, {}, loudness_of(step));
      plain.step(step, kLearningRate, loudness_of(step));
      rig.engine->make_durable();
    }
  }
}

TEST(EngineSpeculation, ANormThatIsNotFinitePutsTheParametersBackAndTrainingCanGoOn) {
  for (const char* placement : {kDemo, "all=nvme", kOnDevice}) {
    for (const std::uint64_t host_bytes : {2 * kMiB, 8 * kMiB}) {
      for (const Speculation speculation : {Speculation::kNever, Speculation::kAlways}) {
        const ScratchDirectory directory;
        const ModelSpec model = small_model();
        EngineConfig config = small_config(directory.path());
        config.placement = parse_placement(placement);
        config.host_budget_bytes = host_bytes;
        config.clip_norm = kClip;
        config.speculation = speculation;
        PlainTraining plain(model, kClip);
        Rig rig(model, config, 2, 8 * kMiB);
        for (std::uint64_t step = 0; step < 4; ++step) {
          if (step % 2 == 1) {
            constexpr float kInfinite = std::numeric_limits<float>::infinity();
            EXPECT_THROW(train_step(*rig.engine, model, step, kLearningRate, {}, kInfinite), Error);
            ASSERT_EQ(rig.engine->generation(), step);
            ASSERT_TRUE(same_params(*rig.engine, plain, model)) << placement << " step " << step;
          }
          train_step(*rig.engine, model, step, kLearningRate, {}, loudness_of(step));
          plain.step(step, kLearningRate, loudness_of(step));
        }
        EXPECT_TRUE(same_params(*rig.engine, plain, model)) << placement;
        rig.engine->make_durable();
        EXPECT_EQ(rig.engine->durable_generation(), 4U);
      }
    }
  }
}

TEST(EngineSpeculation, NeedsAWayBack) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.speculation = Speculation::kAlways;
  const auto message = [&] {
    try {
      const Rig rig(small_model(), config);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(), "");
  config.resume = EngineConfig::Resume::kNever;
  config.slots = 1;
  EXPECT_THAT(message(), HasSubstr("`slots=2`"));
  config.slots = 2;
  config.placement = parse_placement("all=host");
  EXPECT_THAT(message(), HasSubstr("optimizer=nvme"));
}

TEST(EngineSpeculation, AnotherLearningRateThanAnnouncedIsRefused) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.clip_norm = kClip;
  Rig rig(model, config);
  pass_step(*rig.engine, model, 0, kLearningRate);
  EXPECT_THROW(rig.engine->step({.learning_rate = 0.5F, .blob = {}}), Error);
}

// The guess is tried once at the start, given up after three wrong ones, and taken up again once
// the rate of right ones has recovered, which it watches all the time.
TEST(SpeculationWatch, LearnsFromTheNormsAlone) {
  SpeculationWatch watch;
  EXPECT_TRUE(watch.worth_it());
  watch.observe(false);
  EXPECT_FALSE(watch.worth_it()) << "wrong at the first try";
  int steps = 0;
  for (; !watch.worth_it(); ++steps) watch.observe(true);
  EXPECT_EQ(steps, 3);
  for (int i = 0; i < 100; ++i) watch.observe(true);
  for (steps = 0; watch.worth_it(); ++steps) watch.observe(false);
  EXPECT_EQ(steps, 3);
  for (int i = 0; i < 100; ++i) watch.observe(false);
  for (steps = 0; !watch.worth_it(); ++steps) watch.observe(true);
  EXPECT_EQ(steps, 11);
}

TEST(SpeculationWatch, DoesNotTryWhereEverySecondGuessIsWrong) {
  SpeculationWatch watch;
  int tried = 0;
  for (int step = 0; step < 1000; ++step) {
    tried += watch.worth_it() ? 1 : 0;
    watch.observe(step % 2 == 1);
  }
  EXPECT_EQ(tried, 1);
}

struct Traffic {
  std::uint64_t read_bytes;
  std::uint64_t write_bytes;
  std::uint64_t hit_bytes;
};

/// The bytes of one steady step.
Traffic traffic_of(std::uint64_t host_bytes, Speculation speculation, const std::string& store) {
  const ModelSpec model = wide_model();
  EngineConfig config = small_config(store);
  config.host_budget_bytes = host_bytes;
  config.clip_norm = kWideClip;
  config.speculation = speculation;
  Rig rig(model, config);
  const Metrics& metrics = rig.engine->metrics();
  const auto now = [&] {
    rig.engine->make_durable();
    return Traffic{metrics.value(Counter::kNvmeReadBytes), metrics.value(Counter::kNvmeWriteBytes),
                   metrics.value(Counter::kRecordCacheHitBytes)};
  };
  const std::uint64_t first = rig.engine->generation();
  train_step(*rig.engine, model, first, kLearningRate);
  const Traffic before = now();
  for (std::uint64_t step = 1; step < 5; ++step)
    train_step(*rig.engine, model, first + step, kLearningRate);
  const Traffic after = now();
  return {(after.read_bytes - before.read_bytes) / 4, (after.write_bytes - before.write_bytes) / 4,
          (after.hit_bytes - before.hit_bytes) / 4};
}

TEST(EngineRecordCache, ReadsFallSmoothlyToNothingAsHostMemoryGrowsAndWritesStay) {
  const ScratchDirectory directory;
  for (const Speculation speculation : {Speculation::kNever, Speculation::kAlways}) {
    std::map<std::uint64_t, int> seen;
    std::uint64_t before = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t writes = 0;
    std::uint64_t hits = 0;
    // The store is made with the smallest budget: chunks of one tile.
    for (std::uint64_t host_bytes = 4 * kMiB; host_bytes <= 11 * kMiB; host_bytes += kMiB / 2) {
      const Traffic step = traffic_of(host_bytes, speculation, directory.path());
      // A gradient that finds no room takes a record back that was read ahead; only updates that
      // start before the norm can bring that about.
      if (speculation == Speculation::kNever) {
        EXPECT_EQ(step.read_bytes + step.hit_bytes, kWideRecordsBytes) << host_bytes;
        EXPECT_LE(step.read_bytes, before) << host_bytes;
      }
      EXPECT_GE(step.read_bytes + step.hit_bytes, kWideRecordsBytes) << host_bytes;
      EXPECT_GE(step.hit_bytes, hits) << host_bytes;
      hits = step.hit_bytes;
      if (writes != 0) {
        EXPECT_EQ(step.write_bytes, writes) << host_bytes;
      }
      before = step.read_bytes;
      writes = step.write_bytes;
      ++seen[step.hit_bytes];
    }
    EXPECT_EQ(before, 0U) << "with all records in host memory nothing is read";
    EXPECT_GE(seen.size(), 6U) << "and it gets there by steps";
    EXPECT_GT(writes, kWideRecordsBytes) << "every step is durable all the same";
  }
}

TEST(EngineRecordCache, SaysWhatItKeeps) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const Rig rig(model, small_config(directory.path()));
  EXPECT_THAT(rig.engine->description(),
              ::testing::Contains(HasSubstr("records stay in host memory")));
  EXPECT_GT(rig.engine->kept_record_bytes(), kRecordsBytes - 1);
}

}  // namespace engine_sweep_test
}  // namespace ziggurat::testing
