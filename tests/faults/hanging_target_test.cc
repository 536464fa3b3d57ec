// SPDX-License-Identifier: Apache-2.0
// tests/faults/hanging_target_test.cc: the target of a save dies at a call of it, and with it every
// call that follows: training goes on, with the bits that it has without a save, and once the
// target is back it is used again.
//
// A sample of the calls; ZIGGURAT_FAULTS=all tries 25 of each kind, 500 in all. How long
// training waits is said, in virtual time, by tests/core/checkpoint_given_up_test.cc; here time is
// real, so that calls hang that name files, and all that is asked is that steps end while the
// target is dead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <map>
#include <random>

#include "aio/faulty_engine.h"
#include "aio/thread_engine.h"
#include "tests/core/saving_trainer.h"
#include "tests/faults/campaign.h"
#include "tests/support/hanging_engine.h"

namespace ziggurat::testing {
namespace {

using test::HangingEngine;
using test::HangingTarget;
using ::testing::IsEmpty;
using Call = HangingTarget::Call;

constexpr std::uint64_t kSteps = 5;
constexpr std::uint64_t kCases = 25;  // of each kind of call, in a whole campaign

struct Way {
  Layout layout;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kNever;
  int slots = 2;
};
void PrintTo(const Way& way, std::ostream* out) { *out << way.layout.name; }

class DyingTarget : public ::testing::TestWithParam<Way> {
 protected:
  struct Run {
    HangingTarget target{};
    std::string folder{};
    double stall_max_s = 60;
    std::uint64_t bandwidth_bytes_per_s = 0;
    std::uint64_t host_bytes = 8 * kMiB;
    Nanoseconds store_read{0};            ///< that reads of the store take longer
    std::vector<SaveOutcome> outcomes{};  ///< of step 1's save, by rank
  };

  /// Step 1 is saved beside those that follow; then, with the target alive, the last.
  void train(Run& run, const std::function<void(HangingTarget&)>& before) {
    const Way& way = GetParam();
    const auto ranks = static_cast<std::size_t>(way.layout.ranks);
    const std::string store = scratch_.path() + "/store";
    std::filesystem::remove_all(store);
    const auto runtimes = connected_runtimes(way.layout.ranks, 1);
    for (const auto& runtime : runtimes) {
      runtime->io_engine = [&run, store](
                               Reactor& reactor,
                               const std::string& directory) -> std::unique_ptr<IoEngine> {
        auto files = std::make_unique<ThreadEngine>(reactor);
        if (directory == run.folder)
          return std::make_unique<HangingEngine>(reactor, std::move(files), run.target);
        if (directory != store || run.store_read.count() == 0) return files;
        auto slow = std::make_unique<FaultyEngine>(reactor, std::move(files));
        slow->plan(Fault::slow(FaultPoint::kRead, run.store_read).from_then_on());
        return slow;
      };
    }
    run.outcomes.resize(ranks);
    std::barrier<> together(way.layout.ranks);
    expect_none(run_ranks(way.layout.ranks, [&](int r) {
      EngineConfig config = config_of(way.layout, store);
      config.speculation = way.speculation;
      config.slots = way.slots;
      config.host_budget_bytes = run.host_bytes;
      config.checkpoint.stall_max_s = run.stall_max_s;
      config.checkpoint.bandwidth_bytes_per_s = run.bandwidth_bytes_per_s;
      SavingTrainer rank(*runtimes[static_cast<std::size_t>(r)], config);
      const CheckpointRequest request{.folder = run.folder, .resume = {}};
      together.arrive_and_wait();
      if (r == 0) before(run.target);
      together.arrive_and_wait();
      EXPECT_TRUE(rank.step(&request).saves);
      for (std::uint64_t step = 2; step <= kSteps; ++step) rank.step();
      EXPECT_EQ(rank.engine().generation(), kSteps);
      together.arrive_and_wait();
      if (r == 0) run.target.come_back();
      rank.engine().finish_saves();
      const std::vector<SaveOutcome> outcomes = rank.engine().ended_saves();
      ASSERT_EQ(outcomes.size(), 1U);
      run.outcomes[static_cast<std::size_t>(r)] = outcomes[0];
      rank.engine().save_checkpoint(request);
      rank.end();
    }));
  }
  static TensorBytes saved(const Run& run, std::uint64_t step) {
    return tensors_of(run.folder + "/" + checkpoint_name(step));
  }
  static bool is_whole(const Run& run, std::uint64_t step) {
    return std::filesystem::exists(run.folder + "/" + checkpoint_name(step) + "/manifest.json");
  }

  void strike(Call call, std::uint64_t position, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Run run{.folder = scratch_.path() + "/target"};
    std::filesystem::remove_all(run.folder);
    run.stall_max_s = 0.001 * static_cast<double>(1 + random() % 40);
    if (random() % 3 == 0) run.bandwidth_bytes_per_s = 4'000'000;
    if (random() % 2 == 0) run.host_bytes = 5 * kMiB;
    if (random() % 3 == 0) run.store_read = std::chrono::milliseconds(1 + random() % 8);
    train(run, [&](HangingTarget& target) { target.die_at(call, position); });
    // Not one that is given up before it comes so far, or is so slow that training ends first.
    died_ += run.target.has_died() ? 1 : 0;
    EXPECT_EQ(run.target.on_reactor(), 0U) << run.target.first_on_reactor();
    for (const SaveOutcome& outcome : run.outcomes) {
      EXPECT_EQ(outcome.failure.has_value(), run.outcomes[0].failure.has_value());
      if (!outcome.failure) continue;
      EXPECT_TRUE(outcome.failure->code() == ErrorCode::kDeadlineExceeded ||
                  outcome.failure->code() == ErrorCode::kUnavailable)
          << outcome.failure->what();
    }
    EXPECT_NE(is_whole(run, 1), run.outcomes[0].failure.has_value());
    if (is_whole(run, 1)) {
      EXPECT_THAT(differing(saved(run, 1), first_), IsEmpty());
    }
    EXPECT_THAT(differing(saved(run, kSteps), last_), IsEmpty());
  }

  ScratchDirectory scratch_;
  std::uint64_t died_ = 0;  // targets
  TensorBytes first_;       // of a run whose target lives
  TensorBytes last_;
};

TEST_P(DyingTarget, CostsTheSaveAndNothingElse) {
  Run sound{.folder = scratch_.path() + "/sound"};
  std::map<Call, std::uint64_t> calls;
  constexpr std::array kCalls{Call::kOpen, Call::kWrite, Call::kSync, Call::kRename};
  train(sound, [](HangingTarget&) {});
  first_ = saved(sound, 1);
  last_ = saved(sound, kSteps);
  for (const Call call : kCalls) calls[call] = sound.target.calls(call) / 2;  // of two saves
  std::mt19937_64 random(std::random_device{}());
  const std::uint64_t cases = all_faults_wanted() ? kCases : faults_wanted(1);
  for (std::uint64_t i = 0; i < cases && !HasFailure(); ++i) {
    for (const Call call : kCalls) {
      const std::uint64_t position = random() % calls[call];
      const std::uint64_t seed = random();
      SCOPED_TRACE(::testing::Message() << "call " << static_cast<int>(call) << " number "
                                        << position << ", seed " << seed);
      strike(call, position, seed);
    }
  }
  if (all_faults_wanted()) {  // four cases may all miss
    EXPECT_GT(died_, 0U);
  }
}

std::vector<Way> ways() {
  using enum EngineConfig::Speculation;
  return {{.layout = {.name = "two_slots"}},
          {.layout = {.name = "one_slot"}, .slots = 1},
          {.layout = {.name = "host", .optimizer = Tier::kHost}},
          {.layout = {.name = "guessed"}, .speculation = kAlways},
          {.layout = {.name = "two_ranks", .ranks = 2}}};
}
INSTANTIATE_TEST_SUITE_P(Saves, DyingTarget, ::testing::ValuesIn(ways()),
                         [](const auto& its) { return its.param.layout.name; });

}  // namespace
}  // namespace ziggurat::testing
