// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_given_up_test.cc: how long training waits for a save, what becomes of one
// that it has waited too long for, and whose values a save takes that begins in mid-backward.
//
// Where time counts it is virtual: it passes when nothing else is left to do, so that what training
// has waited is what the engine says, exactly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "tests/core/saving_trainer.h"
#include "tests/support/hanging_engine.h"

namespace ziggurat::testing {
namespace checkpoint_given_up_test {

using test::HangingEngine;
using test::HangingTarget;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Way {
  Layout layout;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kNever;
  int slots = 2;
  std::uint64_t host_bytes = 8 * kMiB;
};
std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.layout.name; }

EngineConfig config_of(const Way& way, const std::string& store) {
  EngineConfig config = config_of(way.layout, store);
  config.speculation = way.speculation;
  config.slots = way.slots;
  config.host_budget_bytes = way.host_bytes;
  return config;
}

std::vector<Way> ways() {
  using enum EngineConfig::Speculation;
  return {{.layout = {.name = "two_slots"}},
          {.layout = {.name = "little_memory"}, .host_bytes = 5 * kMiB},
          {.layout = {.name = "one_slot"}, .slots = 1},
          {.layout = {.name = "guessed"}, .speculation = kAlways},
          {.layout = {.name = "host", .optimizer = Tier::kHost}}};
}

/// One rank in virtual time, its store and the target of its saves on a simulated disk each.
class InVirtualTime : public ::testing::TestWithParam<Way> {
 protected:
  void open(const Way& way, const std::function<void(EngineConfig&)>& change) {
    runtime_ = Runtime::create(
        {.threads = 1,
         .trace_path = "",
         .io_engine = [this](Reactor& reactor,
                             const std::string& directory) { return files_in(reactor, directory); },
         .clock = Clock::Kind::kVirtual});
    EngineConfig config = config_of(way, scratch_.path() + "/store");
    change(config);
    rank_ = std::make_unique<SavingTrainer>(*runtime_, config);
  }
  std::unique_ptr<IoEngine> files_in(Reactor& reactor, const std::string& directory) {
    const bool is_target = directory == request_.folder;
    auto disk = std::make_unique<SimulatedEngine>(reactor, is_target ? drive_ : disk_, options_);
    if (!is_target) return disk;
    auto slow = std::make_unique<FaultyEngine>(reactor, std::move(disk));
    for (const Fault& fault : faults_) slow->plan(fault);
    return std::make_unique<HangingEngine>(reactor, std::move(slow), target_);
  }
  /// While it stands, no timer fires: nothing on a drive ends.
  void stop_time() {
    runtime_->reactor.block_on([](Reactor& reactor) -> Task<> {
      reactor.external_begin();
      co_return;
    }(runtime_->reactor));
  }
  void let_time_pass() {
    runtime_->reactor.block_on([](Reactor& reactor) -> Task<> {
      reactor.external_end();
      co_return;
    }(runtime_->reactor));
  }
  double now_s() {
    return runtime_->reactor.block_on([](Reactor& reactor) -> Task<double> {
      co_return std::chrono::duration<double>(reactor.clock().now()).count();
    }(runtime_->reactor));
  }
  SaveOutcome outcome() {
    rank_->engine().finish_saves();
    const std::vector<SaveOutcome> all = rank_->engine().ended_saves();
    EXPECT_EQ(all.size(), 1U);
    return all.empty() ? SaveOutcome{} : all[0];
  }
  static void expect_given_up(const SaveOutcome& outcome) {
    ASSERT_TRUE(outcome.failure);
    EXPECT_EQ(outcome.failure->code(), ErrorCode::kDeadlineExceeded);
    EXPECT_THAT(outcome.failure->what(), HasSubstr("`checkpoint_stall_max`"));
  }

  ~InVirtualTime() override { target_.come_back(); }  // or the engine's end would wait for it

  ScratchDirectory scratch_;
  CheckpointRequest request_{.folder = scratch_.path() + "/target", .resume = {}};
  SimulatedDisk disk_;
  SimulatedDisk drive_;
  SimulatedEngineOptions options_;
  std::vector<Fault> faults_;
  HangingTarget target_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<SavingTrainer> rank_;
};

/// From the n-th write on nothing comes back from the target. All waits of all steps together are
/// the limit, and what is left of a read of the store.
TEST_P(InVirtualTime, ADeadTargetHoldsTrainingForTheLimitAndOneReadAtMost) {
  constexpr double kLimit = 3;
  options_.read_bytes_per_second = 1e7;
  for (const std::uint64_t position : {0, 1, 2, 5, 9}) {
    SCOPED_TRACE(position);
    open(GetParam(), [&](EngineConfig& config) { config.checkpoint.stall_max_s = kLimit; });
    const double one_read =
        2 * static_cast<double>(rank_->engine().read_ahead_bytes()) / 1e7;  // no record is larger
    target_.die_at(HangingTarget::Call::kWrite, position);
    EXPECT_TRUE(rank_->step(&request_).saves);
    for (int step = 2; step <= 6; ++step) rank_->step();
    EXPECT_EQ(rank_->engine().generation(), 6U);
    EXPECT_TRUE(target_.is_dead());
    target_.come_back();
    const SaveOutcome given_up = outcome();
    expect_given_up(given_up);
    EXPECT_GE(given_up.stalled_s, kLimit);
    EXPECT_LE(given_up.stalled_s, kLimit + one_read);
    rank_->engine().save_checkpoint(request_);
    rank_->end();
    rank_.reset();
    runtime_.reset();
    disk_ = SimulatedDisk();
    drive_ = SimulatedDisk();
  }
}

INSTANTIATE_TEST_SUITE_P(Saves, InVirtualTime, ::testing::ValuesIn(ways()),
                         [](const auto& its) { return its.param.layout.name; });

const Way kHost{.layout = {.name = "host", .optimizer = Tier::kHost}};

class SaveOfStateInMemory : public InVirtualTime {
 protected:
  /// The step after the one that is saved waits for the save, and for nothing else.
  void save_and_wait(const std::function<void(EngineConfig&)>& change) {
    open(kHost, change);
    stop_time();
    EXPECT_TRUE(rank_->step(&request_).saves);
    rank_->step();
    let_time_pass();
    rank_->step();
  }
};

/// Nothing is waited for at the end of a run that may never come; and what comes late is nobody's.
TEST_F(SaveOfStateInMemory, HoldsTheEndOfARunNoLongerThanItsTargetMayBeSilent) {
  for (const double limit : {0.5, 25.0}) {
    SCOPED_TRACE(limit);
    open(kHost, [&](EngineConfig& config) { config.checkpoint.stall_max_s = limit; });
    target_.die_at(HangingTarget::Call::kWrite, 3);
    EXPECT_TRUE(rank_->step(&request_).saves);
    const double before = now_s();
    const SaveOutcome given_up = outcome();
    EXPECT_NEAR(now_s() - before, std::max(limit, 10.0), std::max(limit, 10.0) / 4);
    expect_given_up(given_up);
    EXPECT_THAT(given_up.failure->what(), HasSubstr("has not answered"));
    EXPECT_TRUE(rank_->engine().saves_hang());
    try {
      rank_->engine().save_checkpoint(request_);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDeadlineExceeded);
      EXPECT_THAT(error.what(), HasSubstr("while the previous one hangs"));
    }
    target_.come_back();
    rank_->engine().finish_saves();
    EXPECT_FALSE(rank_->engine().saves_hang());
    EXPECT_THAT(rank_->engine().ended_saves(), IsEmpty()) << "it was said";
    rank_->engine().save_checkpoint(request_);
    rank_->end();
    rank_.reset();
    runtime_.reset();
    disk_ = SimulatedDisk();
    drive_ = SimulatedDisk();
  }
}

TEST_F(SaveOfStateInMemory, IsWaitedForAtTheEndOfARunAsLongAsItsTargetAnswers) {
  faults_ = {Fault::slow(FaultPoint::kWrite, std::chrono::seconds(7)).from_then_on()};
  open(kHost, [](EngineConfig& config) { config.checkpoint.stall_max_s = 1e6; });
  const double before = now_s();  // where a worker is late, time passes in the step already
  EXPECT_TRUE(rank_->step(&request_).saves);
  const SaveOutcome whole = outcome();
  EXPECT_FALSE(whole.failure) << whole.failure->what();
  EXPECT_GT(now_s() - before, 14);
}

/// Every write ends, but all of them take longer than the limit.
TEST_F(SaveOfStateInMemory, IsGivenUpWhenTheLimitIsReachedAndNotLater) {
  faults_ = {Fault::slow(FaultPoint::kWrite, std::chrono::seconds(1)).from_then_on()};
  save_and_wait([](EngineConfig& config) { config.checkpoint.stall_max_s = 1.5; });
  const SaveOutcome given_up = outcome();
  expect_given_up(given_up);
  EXPECT_DOUBLE_EQ(given_up.stalled_s, 1.5);
}

TEST_F(SaveOfStateInMemory, IsWaitedForAsLongAsTheLimitIsNotReached) {
  faults_ = {Fault::slow(FaultPoint::kWrite, std::chrono::hours(1)).from_then_on()};
  for (const double limit : {1e6, 1e10, 1e12, 1e300}) {
    SCOPED_TRACE(limit);
    save_and_wait([&](EngineConfig& config) { config.checkpoint.stall_max_s = limit; });
    const SaveOutcome whole = outcome();
    EXPECT_FALSE(whole.failure) << whole.failure->what();
    EXPECT_GE(whole.stalled_s, 3600);
    rank_.reset();
    runtime_.reset();
    disk_ = SimulatedDisk();
    drive_ = SimulatedDisk();
  }
}

/// Writing a record at this bandwidth would take a day.
TEST_F(SaveOfStateInMemory, EndsWhenItIsGivenUpAlsoWhereItWaitsForItsBandwidth) {
  save_and_wait([](EngineConfig& config) {
    config.checkpoint.stall_max_s = 2;
    config.checkpoint.bandwidth_bytes_per_s = 5;
  });
  const SaveOutcome given_up = outcome();
  expect_given_up(given_up);
  EXPECT_LT(given_up.seconds, 3);
}

TEST_F(SaveOfStateInMemory, NeedsALimitThatIsANumberOfSeconds) {
  for (const double limit : {0.0, -1.0, std::nan("")}) {
    EXPECT_THROW(open(kHost, [&](EngineConfig& config) { config.checkpoint.stall_max_s = limit; }),
                 Error)
        << limit;
    rank_.reset();
    runtime_.reset();
  }
}

/// Its lanes read slots, slowly, while sweeps wait to write them: what is being read is waited for,
/// however often a save is given up then.
TEST(SaveFromSlots, IsGivenUpWithoutLosingTheSlotThatIsBeingRead) {
  const ScratchDirectory scratch;
  const Way way{.layout = {.name = "nvme"}, .host_bytes = 2 * kMiB};
  const std::string store = scratch.path() + "/store";
  const auto runtimes = connected_runtimes(1, 1);
  Runtime& runtime = *runtimes[0];
  FaultyEngine* drive = nullptr;
  runtime.io_engine = [&, usual = runtime.io_engine](
                          Reactor& reactor,
                          const std::string& directory) -> std::unique_ptr<IoEngine> {
    if (directory != store) return usual(reactor, directory);
    auto faulty = std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
    drive = faulty.get();
    return faulty;
  };
  EngineConfig config = config_of(way, store);
  config.checkpoint.stall_max_s = 0.012;
  config.checkpoint.bandwidth_bytes_per_s = 4'000'000;
  CheckpointRank rank(runtime, way.layout, config, "");
  const CheckpointRequest request{.folder = scratch.path() + "/target", .resume = {}};
  runtime.reactor.post([&] {
    drive->plan(Fault::slow(FaultPoint::kRead, std::chrono::milliseconds(10)).from_then_on());
  });
  int given_up = 0;
  for (int step = 0; step < 400 && given_up < 5; ++step) {
    rank.step(&request);
    for (const SaveOutcome& outcome : rank.engine->ended_saves())
      given_up += outcome.failure ? 1 : 0;
  }
  EXPECT_EQ(given_up, 5);
  rank.end();
}

class SaveInMidBackward : public ::testing::TestWithParam<Way> {
 protected:
  /// Two steps, and all of a third but its end.
  static void train(CheckpointRank& rank, const Layout& layout, bool wait_for_guesses) {
    Engine& engine = *rank.engine;
    rank.step();
    rank.step();
    engine.make_durable();
    const std::uint64_t written = engine.metrics().value(Counter::kStateWriteBytes);
    const ModelSpec model = part_model(layout);
    engine.prepare_step({.learning_rate = kPartLearningRate, .blob = {}});
    for (auto u = static_cast<UnitId>(model.units.size()); u-- > 0;) {
      engine.acquire(u);
      for (float& value : HostDevice::view(engine.gradient(u))) value += 0.5F;
      engine.release(u);
      engine.finish_gradient(u);
    }
    // What is guessed is written as soon as it is made.
    while (wait_for_guesses && engine.metrics().value(Counter::kStateWriteBytes) <= written)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ScratchDirectory scratch_;
};

/// Guesses at the third step have changed what is in memory, are about to, or do so meanwhile.
TEST_P(SaveInMidBackward, HasTheNewestFinishedStepAndNothingOfTheNext) {
  const Way way = GetParam();
  const std::string store = scratch_.path() + "/store";
  const std::string name = "/" + checkpoint_name(2);
  {
    const auto runtimes = connected_runtimes(1, 1);
    CheckpointRank rank(*runtimes[0], way.layout, config_of(way, store), "");
    rank.step();
    rank.step();
    rank.engine->save_checkpoint({.folder = scratch_.path() + "/plain", .resume = {}});
    rank.end();
  }
  const TensorBytes expected = tensors_of(scratch_.path() + "/plain" + name);
  for (int round = 0; round < 4; ++round) {
    SCOPED_TRACE(round);
    std::filesystem::remove_all(store);
    const std::string folder = scratch_.path() + "/mid" + std::to_string(round);
    const auto runtimes = connected_runtimes(1, 1);
    CheckpointRank rank(*runtimes[0], way.layout, config_of(way, store), "");
    const bool guesses = way.speculation == EngineConfig::Speculation::kAlways;
    train(rank, way.layout, guesses && round == 0);
    rank.engine->save_checkpoint({.folder = folder, .resume = {}});
    EXPECT_THAT(differing(tensors_of(folder + name), expected), IsEmpty());
    rank.engine->step({.learning_rate = kPartLearningRate, .blob = {}});
    EXPECT_EQ(rank.engine->generation(), 3U);
    rank.end();
  }
}

std::vector<Way> with_all_in_memory() {
  std::vector<Way> all = ways();
  all.push_back({.layout = {.name = "all_kept_and_guessed"},
                 .speculation = EngineConfig::Speculation::kAlways,
                 .host_bytes = 64 * kMiB});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Saves, SaveInMidBackward, ::testing::ValuesIn(with_all_in_memory()),
                         [](const auto& its) { return its.param.layout.name; });

}  // namespace checkpoint_given_up_test
}  // namespace ziggurat::testing
