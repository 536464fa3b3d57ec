// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_background_test.cc: saves while training goes on: the bits of the step that
// was asked for, whatever the next steps do meanwhile; and a target that fails or hangs costs the
// save alone.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "aio/faulty_engine.h"
#include "tests/core/checkpoint_rig.h"
#include "tests/support/loop_filesystem.h"

namespace ziggurat::testing {
namespace checkpoint_background_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kSteps = 6;
constexpr std::uint64_t kSavedStep = 3;

struct Way {
  Layout layout;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;
  int slots = 2;
  std::uint64_t durable_every_steps = 1;
  std::uint64_t host_bytes = 8 * kMiB;
  bool slow = false;  ///< the target's writes take longer than steps
};
std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.layout.name; }

EngineConfig config_of(const Way& way, const std::string& store) {
  EngineConfig config = config_of(way.layout, store);
  config.speculation = way.speculation;
  config.slots = way.slots;
  config.durable_every_steps = way.durable_every_steps;
  config.host_budget_bytes = way.host_bytes;
  return config;
}

/// The target of saves: an engine whose faults a test plans.
struct Target {
  std::string folder;
  std::vector<FaultyEngine*> engines{};  // by rank
  std::vector<Fault> faults{};
  int faulty_rank = -1;  ///< -1: all
};

/// Runs `body` on each rank, with the faults of `target` in its files and no others.
void on_target_ranks(const Way& way, const std::string& store, Target& target,
                     const std::function<void(CheckpointRank&, int rank)>& body,
                     const std::string& from = "") {
  std::filesystem::remove_all(store);
  const auto runtimes = connected_runtimes(way.layout.ranks, 1);
  target.engines.assign(runtimes.size(), nullptr);
  for (std::size_t rank = 0; rank < runtimes.size(); ++rank) {
    Runtime& runtime = *runtimes[rank];
    runtime.io_engine = [&target, rank, usual = runtime.io_engine](
                            Reactor& reactor,
                            const std::string& directory) -> std::unique_ptr<IoEngine> {
      if (directory != target.folder) return usual(reactor, directory);
      auto faulty =
          std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
      const bool mine = target.faulty_rank < 0 || target.faulty_rank == static_cast<int>(rank);
      for (const Fault& fault : target.faults) {
        if (mine) faulty->plan(fault);
      }
      target.engines[rank] = faulty.get();
      return faulty;
    };
  }
  expect_none(run_ranks(way.layout.ranks, [&](int rank) {
    CheckpointRank its(*runtimes[static_cast<std::size_t>(rank)], way.layout, config_of(way, store),
                       from);
    body(its, rank);
    its.end();
  }));
}

class EveryWay : public ::testing::TestWithParam<Way> {
 protected:
  ScratchDirectory scratch_;
  std::string store_ = scratch_.path() + "/store";
};

TEST_P(EveryWay, SavesTheStepThatItWasAskedForAndTrainingHasItsBits) {
  Way way = GetParam();
  Target plain{.folder = scratch_.path() + "/plain"};
  on_target_ranks(way, store_, plain, [&](CheckpointRank& rank, int) {
    for (int step = 0; step < kSteps; ++step) {
      rank.step();
      if (step + 1 == kSavedStep || step + 1 == kSteps)
        rank.engine->save_checkpoint({.folder = plain.folder, .resume = {}});
    }
  });
  Target target{.folder = scratch_.path() + "/target"};
  if (way.slow)
    target.faults = {Fault::slow(FaultPoint::kWrite, std::chrono::milliseconds(10)).from_then_on()};
  on_target_ranks(way, store_, target, [&](CheckpointRank& rank, int) {
    const CheckpointRequest request{.folder = target.folder, .resume = {}};
    for (std::uint64_t step = 1; step <= kSteps; ++step)
      rank.step(step == kSavedStep ? &request : nullptr);
    rank.engine->finish_saves();
    const std::vector<SaveOutcome> outcomes = rank.engine->ended_saves();
    ASSERT_EQ(outcomes.size(), 1U);
    EXPECT_FALSE(outcomes[0].failure) << outcomes[0].failure->what();
    EXPECT_EQ(outcomes[0].step, kSavedStep);
    rank.engine->save_checkpoint(request);
  });
  for (const std::uint64_t step : {kSavedStep, std::uint64_t{kSteps}}) {
    EXPECT_THAT(differing(tensors_of(target.folder + "/" + checkpoint_name(step)),
                          tensors_of(plain.folder + "/" + checkpoint_name(step))),
                IsEmpty())
        << "step " << step;
  }
}

std::vector<Way> ways() {
  using enum EngineConfig::Speculation;
  std::vector<Way> all;
  for (const bool slow : {false, true}) {
    const auto add = [&](Way way) {
      way.slow = slow;
      if (slow) way.layout.name += "_slow";
      all.push_back(std::move(way));
    };
    add({.layout = {.name = "nvme"}});
    add({.layout = {.name = "never_guessed"}, .speculation = kNever});
    add({.layout = {.name = "always_guessed"}, .speculation = kAlways});
    add({.layout = {.name = "one_slot"}, .slots = 1});
    add({.layout = {.name = "every_third"}, .durable_every_steps = 3});
    add({.layout = {.name = "little_memory"}, .host_bytes = 5 * kMiB});
    add({.layout = {.name = "host", .optimizer = Tier::kHost}});
    add({.layout = {.name = "device", .optimizer = Tier::kDevice, .params = Tier::kDevice}});
    add({.layout = {.name = "two_ranks", .ranks = 2}});
    add({.layout = {.name = "two_ranks_stage0", .ranks = 2, .stage = 0}});
    add({.layout = {.name = "two_ranks_tp", .ranks = 2, .tp = 2}});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Ways, EveryWay, ::testing::ValuesIn(ways()),
                         [](const auto& its) { return its.param.layout.name; });

class FailingTarget : public ::testing::Test {
 protected:
  /// Step 2 is saved while training goes on to the end; what its save came to, by rank.
  std::vector<SaveOutcome> run(const Way& way, Target& target) {
    std::vector<SaveOutcome> outcomes(static_cast<std::size_t>(way.layout.ranks));
    on_target_ranks(way, scratch_.path() + "/store", target, [&](CheckpointRank& rank, int r) {
      const CheckpointRequest request{.folder = target.folder, .resume = {}};
      for (std::uint64_t step = 1; step <= kSteps; ++step)
        rank.step(step == 2 ? &request : nullptr);
      rank.engine->finish_saves();
      for (const SaveOutcome& outcome : rank.engine->ended_saves())
        outcomes[static_cast<std::size_t>(r)] = outcome;
      if (FaultyEngine* engine = target.engines[static_cast<std::size_t>(r)]) {
        const std::lock_guard lock(calls_mutex_);
        for (std::size_t p = 0; p < calls_.size(); ++p)
          calls_[p] = std::max(calls_[p], engine->calls(static_cast<FaultPoint>(p)));
        engine->clear_plan();
      }
      rank.engine->make_durable();
      rank.engine->save_checkpoint(request);  // a target that works again is used again
    });
    return outcomes;
  }
  TensorBytes trained(const Target& target) {
    return tensors_of(target.folder + "/" + checkpoint_name(kSteps));
  }

  ScratchDirectory scratch_;
  std::mutex calls_mutex_;  // each rank counts on a thread of its own
  std::array<std::uint64_t, static_cast<std::size_t>(FaultPoint::kCount)> calls_{};
};

/// Every call of a save in its turn, on one rank of two: the save fails, on all ranks, and says
/// why; nothing that could be taken for a checkpoint is left; training has the same bits.
TEST_F(FailingTarget, CostsTheSaveAloneWhicheverCallFails) {
  const Way way{.layout = {.name = "two", .ranks = 2}};
  Target sound{.folder = scratch_.path() + "/sound"};
  run(way, sound);
  const TensorBytes expected = trained(sound);
  const TensorBytes step = tensors_of(sound.folder + "/" + checkpoint_name(2));
  const auto calls = calls_;
  int failed = 0;
  int runs = 0;
  for (std::size_t p = 0; p < calls.size(); ++p) {
    const auto point = static_cast<FaultPoint>(p);
    const std::uint64_t stride = std::max<std::uint64_t>(1, calls[p] / 12);
    for (std::uint64_t call = 0; call < calls[p]; call += stride) {
      for (const int rank : {0, 1}) {
        SCOPED_TRACE(::testing::Message()
                     << "point " << p << ", call " << call << ", rank " << rank);
        Target target{.folder = scratch_.path() + "/failing",
                      .faults = {Fault::fail(point, call % 2 == 0 ? ENOSPC : EIO).at(call)},
                      .faulty_rank = rank};
        std::filesystem::remove_all(target.folder);
        const std::vector<SaveOutcome> outcomes = run(way, target);
        ++runs;
        const std::string manifest = target.folder + "/" + checkpoint_name(2) + "/manifest.json";
        ASSERT_EQ(outcomes[0].failure.has_value(), outcomes[1].failure.has_value());
        if (outcomes[0].failure) {
          ++failed;
          const std::string both =
              std::string(outcomes[0].failure->what()) + outcomes[1].failure->what();
          EXPECT_THAT(both, HasSubstr(target.folder));
        }
        // A commit that failed after the manifest had its name may stay; it is whole then.
        if (std::filesystem::exists(manifest)) {
          EXPECT_THAT(differing(tensors_of(target.folder + "/" + checkpoint_name(2)), step),
                      IsEmpty());
        } else {
          EXPECT_TRUE(outcomes[0].failure.has_value());
        }
        EXPECT_THAT(differing(trained(target), expected), IsEmpty());
      }
    }
  }
  EXPECT_GT(failed, runs / 2);
}

TEST_F(FailingTarget, ThatHangsForAWhileIsWaitedForWhereARecordWouldBeGone) {
  for (const Tier tier : {Tier::kNvme, Tier::kHost}) {
    Way way{.layout = {.name = "hanging", .optimizer = tier}};
    Target sound{.folder = scratch_.path() + "/sound"};
    std::filesystem::remove_all(sound.folder);
    run(way, sound);
    Target target{.folder = scratch_.path() + "/hanging"};
    target.faults = {Fault::slow(FaultPoint::kWrite, std::chrono::milliseconds(600)).at(3)};
    std::filesystem::remove_all(target.folder);
    SaveOutcome outcome;
    on_target_ranks(way, scratch_.path() + "/store", target, [&](CheckpointRank& rank, int) {
      const CheckpointRequest request{.folder = target.folder, .resume = {}};
      for (std::uint64_t step = 1; step <= kSteps; ++step)
        rank.step(step == 2 ? &request : nullptr);
      rank.engine->finish_saves();
      outcome = rank.engine->ended_saves().at(0);
      rank.engine->save_checkpoint(request);
    });
    EXPECT_FALSE(outcome.failure) << "half a second is less than checkpoint_stall_max";
    EXPECT_THAT(differing(trained(target), trained(sound)), IsEmpty());
  }
}

TEST_F(FailingTarget, GivesASaveUpThatTrainingWaitsForTooLong) {
  const ScratchDirectory scratch;
  Target target{.folder = scratch.path() + "/target"};
  target.faults = {Fault::slow(FaultPoint::kWrite, std::chrono::seconds(2)).from_then_on()};
  Way way{.layout = {.name = "host", .optimizer = Tier::kHost}};
  std::filesystem::remove_all(scratch.path() + "/store");
  const auto runtimes = connected_runtimes(1, 1);
  Runtime& runtime = *runtimes[0];
  FaultyEngine* engine = nullptr;
  runtime.io_engine = [&, usual = runtime.io_engine](
                          Reactor& reactor,
                          const std::string& directory) -> std::unique_ptr<IoEngine> {
    if (directory != target.folder) return usual(reactor, directory);
    auto faulty = std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
    faulty->plan(target.faults[0]);
    engine = faulty.get();
    return faulty;
  };
  EngineConfig config = config_of(way, scratch.path() + "/store");
  config.checkpoint.stall_max_s = 0.05;
  CheckpointRank rank(runtime, way.layout, config, "");
  const CheckpointRequest request{.folder = target.folder, .resume = {}};
  EXPECT_TRUE(rank.step(&request).saves);
  rank.step();
  rank.step();  // ends, though not a record was copied: that was given up
  EXPECT_EQ(rank.engine->generation(), 3U);
  EXPECT_FALSE(rank.step(&request).saves) << "the drive still has the first one's bytes";
  rank.engine->finish_saves();
  const std::vector<SaveOutcome> outcomes = rank.engine->ended_saves();
  ASSERT_EQ(outcomes.size(), 1U);
  ASSERT_TRUE(outcomes[0].failure);
  EXPECT_EQ(outcomes[0].step, 1U);
  EXPECT_EQ(outcomes[0].failure->code(), ErrorCode::kDeadlineExceeded);
  EXPECT_THAT(outcomes[0].failure->what(), HasSubstr("checkpoint_stall_max"));
  EXPECT_GT(outcomes[0].stalled_s, 0.04);
  EXPECT_FALSE(std::filesystem::exists(target.folder + "/" + checkpoint_name(1)));
  engine->clear_plan();
  rank.end();
}

/// A filesystem on which every call that changes something waits, as on a server that is gone.
class Frozen {
 public:
  explicit Frozen(const std::string& mount_point)
      : directory_(::open(mount_point.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    is_frozen_ = ::ioctl(directory_, FIFREEZE, 0) == 0;
  }
  ~Frozen() {
    thaw();
    ::close(directory_);
  }
  Frozen(const Frozen&) = delete;
  bool is_frozen() const noexcept { return is_frozen_; }
  void thaw() {
    if (!std::exchange(is_frozen_, false)) return;
    EXPECT_EQ(::ioctl(directory_, FITHAW, 0), 0);
  }

 private:
  int directory_;
  bool is_frozen_;
};

/// Not even a directory can be made there: the save is given up after stall_max, every step is made
/// meanwhile, and once the target answers the next save is whole.
TEST_F(FailingTarget, ThatHangsFromTheFirstCallOnStopsNoStep) {
  const test::LoopFilesystem drive(64 * kMiB, test::LoopFilesystem::Kind::kExt4);
  if (!drive.why_not().empty()) GTEST_SKIP() << drive.why_not();
  const Way way{.layout = {.name = "host", .optimizer = Tier::kHost}};
  EngineConfig config = config_of(way, scratch_.path() + "/store");
  config.checkpoint.stall_max_s = 0.1;
  const auto runtimes = connected_runtimes(1, 1);
  CheckpointRank rank(*runtimes[0], way.layout, config, "");
  const CheckpointRequest request{.folder = drive / "target", .resume = {}};
  {
    Frozen frozen(drive.path().string());
    if (!frozen.is_frozen()) GTEST_SKIP() << "FIFREEZE: " << std::strerror(errno);
    EXPECT_TRUE(rank.step(&request).saves);
    for (int step = 0; step < 3; ++step) rank.step();
    EXPECT_EQ(rank.engine->generation(), 4U);
    EXPECT_FALSE(rank.step(&request).saves) << "the first one still hangs";
  }
  rank.engine->finish_saves();
  const std::vector<SaveOutcome> outcomes = rank.engine->ended_saves();
  ASSERT_EQ(outcomes.size(), 1U);
  ASSERT_TRUE(outcomes[0].failure);
  EXPECT_EQ(outcomes[0].failure->code(), ErrorCode::kDeadlineExceeded);
  EXPECT_FALSE(std::filesystem::exists(request.folder + "/" + checkpoint_name(1)));
  rank.engine->save_checkpoint(request);
  EXPECT_FALSE(tensors_of(request.folder + "/" + checkpoint_name(5)).empty());
  rank.end();
}

/// One rank alone cannot open its target: no other waits for it.
TEST_F(FailingTarget, ThatOneRankCannotOpenFailsTheSaveOnAll) {
  const Way way{.layout = {.name = "two", .ranks = 2}};
  const std::string folder = scratch_.path() + "/target";
  const auto runtimes = connected_runtimes(2, 1);
  runtimes[1]->io_engine = [&folder, usual = runtimes[1]->io_engine](Reactor& reactor,
                                                                     const std::string& directory) {
    if (directory == folder) throw Error(ErrorCode::kUnavailable, "no engine for " + folder);
    return usual(reactor, directory);
  };
  expect_none(run_ranks(2, [&](int r) {
    CheckpointRank rank(*runtimes[static_cast<std::size_t>(r)], way.layout,
                        config_of(way, scratch_.path() + "/store"), "");
    const CheckpointRequest request{.folder = folder, .resume = {}};
    EXPECT_TRUE(rank.step(&request).saves);
    rank.step();
    rank.engine->finish_saves();
    const std::vector<SaveOutcome> outcomes = rank.engine->ended_saves();
    ASSERT_EQ(outcomes.size(), 1U);
    EXPECT_TRUE(outcomes[0].failure);
    rank.end();
  }));
}

/// Closed in the middle of a save: it ends, nothing of it is left that could be taken for a
/// checkpoint, and the store goes on from its newest step.
TEST_F(FailingTarget, MayBeInUseWhenTheEngineIsClosed) {
  for (const int ranks : {1, 2}) {
    const Way way{.layout = {.name = "closed", .ranks = ranks}};
    Target target{.folder = scratch_.path() + "/closed" + std::to_string(ranks)};
    target.faults = {
        Fault::slow(FaultPoint::kWrite, std::chrono::milliseconds(150)).from_then_on()};
    const auto runtimes = connected_runtimes(ranks, 1);
    for (const auto& runtime : runtimes) {
      runtime->io_engine = [&target, usual = runtime->io_engine](
                               Reactor& reactor,
                               const std::string& directory) -> std::unique_ptr<IoEngine> {
        if (directory != target.folder) return usual(reactor, directory);
        auto faulty =
            std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
        faulty->plan(target.faults[0]);
        return faulty;
      };
    }
    const std::string store = scratch_.path() + "/closed-store" + std::to_string(ranks);
    run_ranks(ranks, [&](int rank) {
      CheckpointRank its(*runtimes[static_cast<std::size_t>(rank)], way.layout,
                         config_of(way, store), "");
      const CheckpointRequest request{.folder = target.folder, .resume = {}};
      its.step();
      its.engine->make_durable();
      its.step(&request);
    });
    EXPECT_FALSE(
        std::filesystem::exists(target.folder + "/" + checkpoint_name(2) + "/manifest.json"));
    const auto again = connected_runtimes(ranks, 1);
    expect_none(run_ranks(ranks, [&](int rank) {
      CheckpointRank its(*again[static_cast<std::size_t>(rank)], way.layout, config_of(way, store),
                         "");
      EXPECT_GE(its.engine->generation(), 1U);
      its.step();
      its.end();
    }));
  }
}

TEST(SaveSettings, AreNeededBeforeACheckpointIsAskedFor) {
  const ScratchDirectory scratch;
  const auto runtimes = connected_runtimes(1, 1);
  EngineConfig config = config_of(Layout{.name = "one"}, scratch.path() + "/store");
  config.checkpoint.saves = false;
  CheckpointRank rank(*runtimes[0], {.name = "one"}, config, "");
  EXPECT_THAT(([&] {
                try {
                  rank.engine->save_checkpoint({.folder = scratch.path(), .resume = {}});
                } catch (const Error& error) {
                  return std::string(error.what());
                }
                return std::string();
              }()),
              HasSubstr("Checkpoint::saves"));
}

}  // namespace checkpoint_background_test
}  // namespace ziggurat::testing
