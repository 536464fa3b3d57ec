// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_durable_test.cc: optimizer state in memory is stored as the training goes on:
// on every rank the same steps, beside the next one, without a changed bit; and a run that is
// killed goes back no further than durable_every.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>

#include "base/error.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_durable_test {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;

struct Where {
  const char* name;
  const char* placement;
  int ranks = 1;
  int stage = 2;
};
void PrintTo(const Where& where, std::ostream* out) { *out << where.name; }

class EngineDurable : public ::testing::TestWithParam<Where> {
 protected:
  EngineConfig config(double durable_every_s) const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam().placement);
    config.strategy.zero_stage = GetParam().stage;
    config.durable_every_s = durable_every_s;
    return config;
  }
  /// Every rank trains `steps` more, with an engine that then is closed as by a kill.
  void train(double durable_every_s, std::uint64_t steps,
             const std::function<void(Engine& engine, std::uint64_t step)>& after_step) {
    const int ranks = GetParam().ranks;
    const auto runtimes = connected_runtimes(ranks, 2);
    std::barrier<> all_done(ranks);
    expect_none(run_ranks(ranks, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model_, config(durable_every_s));
      Engine& engine = *rig.engine;
      const std::uint64_t first = engine.generation();
      PlainTraining plain(model_, 1.0F);
      plain.world_size = ranks;
      for (std::uint64_t step = 0; step < first; ++step) plain.step(step, kLearningRate);
      EXPECT_TRUE(same_params(engine, plain, model_)) << "rank " << rank;
      for (std::uint64_t step = first; step < first + steps; ++step) {
        train_step(engine, model_, step, kLearningRate, {}, 1.0F, rank);
        after_step(engine, step + 1);
        plain.step(step, kLearningRate);
      }
      EXPECT_TRUE(same_params(engine, plain, model_)) << "rank " << rank;
      all_done.arrive_and_wait();
    }));
  }

  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(
    Engine, EngineDurable,
    ::testing::Values(Where{"AllHost", "all=host"}, Where{"AllDevice", "all=device"},
                      Where{"OptimizerOnHost", "params=nvme,grads=nvme,optimizer=host"},
                      Where{"TwoRanks", "all=host", 2}, Where{"TwoRanksStage3", "all=host", 2, 3}),
    [](const auto& one) { return std::string(one.param.name); });

// With no time between checkpoints one begins after every step, or, where one is still being
// written when a step ends, after the next.
TEST_P(EngineDurable, StoresEveryStepOrTwoIfToldToAndIsResumedThere) {
  std::uint64_t last = 0;
  for (int run = 0; run < 2; ++run) {
    train(1e-9, 5, [](Engine& engine, std::uint64_t step) {
      EXPECT_GE(engine.durable_generation() + 2, step);
    });
    last += 3;
  }
  train(0, 1, [&](Engine& engine, std::uint64_t step) {
    EXPECT_GE(step, last + 1);
    EXPECT_GE(engine.durable_generation(), last);
  });
}

TEST_P(EngineDurable, StoresNothingBeforeItIsTime) {
  for (const double never : {0.0, 1e9}) {
    train(never, 3, [&](Engine& engine, std::uint64_t step) {
      EXPECT_EQ(engine.durable_generation(), 0U) << "step " << step;
      EXPECT_EQ(engine.metrics().value(Counter::kCheckpoints), 0U);
    });
  }
}

TEST(EngineDurableNotes, SayWhatAKillLosesAndWhatThatCosts) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.durable_every_s = 90;
  EXPECT_THAT(Rig(small_model(), config).engine->description(),
              Contains(HasSubstr("every finished step becomes durable")));
  config.placement = parse_placement("all=host");
  EXPECT_THAT(Rig(small_model(), config).engine->description(),
              Contains(::testing::AllOf(HasSubstr("every 90 s"), HasSubstr("2.2 MiB"))));
  config.durable_every_s = 0;
  EXPECT_THAT(Rig(small_model(), config).engine->description(),
              Contains(HasSubstr("a kill loses all steps")));
}

/// A step as the killed process saw it return, by its own clock.
struct Returned {
  std::uint64_t step;
  std::int64_t at_ns;
};

constexpr double kDurableEvery = 0.04;

/// Trains until it is killed, and tells of every step.
[[noreturn]] void train_until_killed(const ModelSpec& model, const EngineConfig& config, int out) {
  Rig rig(model, config);
  for (std::uint64_t step = rig.engine->generation();; ++step) {
    train_step(*rig.engine, model, step, kLearningRate);
    const Returned told{step + 1, monotonic_now().count()};
    if (::write(out, &told, sizeof(told)) != sizeof(told)) ::_exit(1);
  }
}

/// The newest step that must have been stored, whatever the machine's speed: it had returned
/// durable_every before the last but one began.
std::uint64_t surely_stored(const std::vector<Returned>& returned) {
  if (returned.size() < 3) return 0;
  const std::int64_t begin = returned[returned.size() - 3].at_ns;
  std::uint64_t newest = 0;
  for (const Returned& step : returned) {
    if (step.at_ns <= begin - static_cast<std::int64_t>(1e9 * kDurableEvery)) newest = step.step;
  }
  return newest;
}

TEST(EngineDurableKill, WithStateInMemoryGoesBackNoFurtherThanDurableEvery) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement("params=host,grads=host,optimizer=host");
  config.durable_every_s = kDurableEvery;
  PlainTraining plain(model, config.clip_norm);
  std::uint64_t trained = 0;  // by plain
  for (int kill = 0; kill < 3; ++kill) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) train_until_killed(model, config, ends[1]);
    ::close(ends[1]);
    std::vector<Returned> returned;
    Returned one{};
    bool killed = false;
    while (::read(ends[0], &one, sizeof(one)) == sizeof(one)) {
      returned.push_back(one);
      if (killed || surely_stored(returned) < returned.front().step + 2) continue;
      ASSERT_EQ(::kill(child, SIGKILL), 0);
      killed = true;
    }
    ::close(ends[0]);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    ASSERT_TRUE(killed) << "the child ended by itself";
    Rig rig(model, config);
    EXPECT_GE(rig.engine->generation(), surely_stored(returned));
    EXPECT_LE(rig.engine->generation(), returned.back().step + 1);
    for (; trained < rig.engine->generation(); ++trained) plain.step(trained, kLearningRate);
    EXPECT_TRUE(same_params(*rig.engine, plain, model));
  }
}

}  // namespace engine_durable_test
}  // namespace ziggurat::testing
