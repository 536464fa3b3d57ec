// SPDX-License-Identifier: Apache-2.0
// tests/faults/checkpoint_fault_test.cc: each call that saves, their commits and what retention
// removes make to their files is the one where a rank dies, all ranks die, or the drive fails. No
// checkpoint that was committed is lost, no half one is taken for whole, and training's own state
// is what it would be.
//
// Real processes on real files. Some calls are struck; ZIGGURAT_FAULTS=all strikes each call of
// each rank until a run ends without having been struck.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cerrno>
#include <filesystem>

#include "base/error.h"
#include "tests/faults/struck_jobs.h"

namespace ziggurat::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kSteps = 7;      // of the run that is struck: it saves steps 2, 4, 6 and 7
constexpr std::uint64_t kMoreSteps = 9;  // of the one that comes next
constexpr std::uint64_t kSampled = 3;    // of each effect on each rank

struct Struck {
  int ranks;
  int rank;  ///< the one that is struck
};

class CheckpointFaults : public ::testing::TestWithParam<Struck> {
 protected:
  std::string path(const std::string& name) const { return scratch_.path() + "/" + name; }
  Job job(std::uint64_t last_step) const {
    return {.ranks = GetParam().ranks,
            .store = path("store"),
            .target = path("target"),
            .last_step = last_step,
            .opened_copy = path("opened"),
            .last_copy = path("last")};
  }
  void clear() const {
    for (const char* const name : {"store", "target", "opened", "last"})
      std::filesystem::remove_all(path(name));
  }

  /// Every state, and how many calls each rank makes.
  void SetUp() override {
    expected_ = states_of_steps(job(kMoreSteps));
    ASSERT_FALSE(expected_.empty());
    clear();
    const std::vector<RankReport> sound = run_job(job(kSteps));
    ASSERT_EQ(trouble(sound), "");
    for (const RankReport& rank : sound) calls_.push_back(rank.calls);
    const FoundCheckpoints found = look_at_checkpoints(path("target"), expected_);
    ASSERT_THAT(found.problems, IsEmpty());
    ASSERT_THAT(found.whole, ElementsAre(kSteps));
    ASSERT_THAT(found.leftovers, IsEmpty());
  }

  /// Whether the call was made.
  bool kill_at(const Strike& strike) {
    clear();
    const std::vector<RankReport> ranks = run_job(job(kSteps), strike);
    const bool was_struck = struck(ranks);
    if (!was_struck) {
      EXPECT_EQ(trouble(ranks), "");
    } else {
      expect_killed(ranks, strike);
      for (const RankReport& rank : ranks) EXPECT_THAT(rank.problems, IsEmpty());
    }
    expect_kept(job(kSteps), expected_, ranks);
    expect_next_goes_on(job(kMoreSteps), expected_, ranks);
    return was_struck;
  }

  /// The save that was struck failed on all ranks, and says why; nothing else did. Or none failed:
  /// the call was retention's, whose save was whole by then, and the next save lets go what it
  /// left.
  void expect_named(const Strike& strike, const std::vector<RankReport>& ranks) const {
    for (const RankReport& rank : ranks) {
      EXPECT_EQ(rank.error, "");
      EXPECT_THAT(rank.problems, IsEmpty());
      EXPECT_TRUE(rank.ended);
      EXPECT_THAT(rank.halves, IsEmpty()) << "a part of the failed save was left";
      ASSERT_EQ(rank.failed.size(), ranks[0].failed.size()) << trouble(ranks);
      if (rank.failed.empty()) continue;
      ASSERT_EQ(rank.failed.size(), 1U) << trouble(ranks);
      EXPECT_EQ(rank.failed.begin()->first, ranks[0].failed.begin()->first);
      EXPECT_THAT(rank.failed.begin()->second, HasSubstr(path("target")));
      EXPECT_THAT(rank.failed.begin()->second, HasSubstr(errno_text(strike.error_number)));
    }
  }

  bool fail_at(const Strike& strike) {
    clear();
    const std::vector<RankReport> ranks = run_job(job(kSteps), strike);
    const bool was_struck = struck(ranks);
    if (was_struck) {
      expect_named(strike, ranks);
    } else {
      EXPECT_EQ(trouble(ranks), "");
    }
    // The last save, which nothing struck, is whole, and all that is left.
    const FoundCheckpoints found = look_at_checkpoints(path("target"), expected_);
    EXPECT_THAT(found.problems, IsEmpty());
    EXPECT_THAT(found.whole, ElementsAre(kSteps));
    EXPECT_THAT(found.leftovers, IsEmpty());
    EXPECT_THAT(look_at_checkpoints(path("last"), expected_).whole, ElementsAre(kSteps));
    return was_struck;
  }

  void at_each_call(Strike strike, const std::function<bool(const Strike&)>& strike_at) {
    strike.rank = GetParam().rank;
    const std::uint64_t struck = strike_calls(strike, calls_, kSampled, strike_at);
    fmt::print("  {} ranks, the last {}: {} calls struck of about {}\n", GetParam().ranks,
               to_string(strike), struck, calls_[static_cast<std::size_t>(strike.rank)]);
  }

  ScratchDirectory scratch_;
  States expected_;
  std::vector<std::uint64_t> calls_;  // of each rank, in a sound run
};

TEST_P(CheckpointFaults, ARankThatIsKilledLosesNoCheckpointAndNoStep) {
  at_each_call({.effect = Strike::Effect::kKill}, [this](const Strike& s) { return kill_at(s); });
}

TEST_P(CheckpointFaults, AJobThatIsKilledLosesNoCheckpointAndNoStep) {
  at_each_call({.effect = Strike::Effect::kKillAll},
               [this](const Strike& s) { return kill_at(s); });
}

TEST_P(CheckpointFaults, ADriveThatIsFullForOneCallCostsOneSave) {
  at_each_call({.effect = Strike::Effect::kErrno, .error_number = ENOSPC},
               [this](const Strike& s) { return fail_at(s); });
}

TEST_P(CheckpointFaults, ADriveThatFailsOneCallCostsOneSave) {
  at_each_call({.effect = Strike::Effect::kErrno, .error_number = EIO},
               [this](const Strike& s) { return fail_at(s); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointFaults,
                         ::testing::Values(Struck{1, 0}, Struck{2, 0}, Struck{2, 1}),
                         [](const auto& its) {
                           return fmt::format("{}of{}", its.param.rank, its.param.ranks);
                         });

}  // namespace
}  // namespace ziggurat::testing
