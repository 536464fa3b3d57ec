// SPDX-License-Identifier: Apache-2.0
// tests/faults/reshard_fault_test.cc: each call to a store's files while it is cut anew for other
// ranks is the one where a rank dies, all ranks die, or the drive fails. The next start, of the old
// number of ranks or of the new one, has the step that was durable, with its bits.
//
// Real processes on real files. Some calls are struck; ZIGGURAT_FAULTS=all strikes each call of
// each rank until a run ends without having been struck.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/error.h"
#include "tests/faults/struck_jobs.h"

namespace ziggurat::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

constexpr std::uint64_t kStep = 3;     // that the old store stands at
constexpr std::uint64_t kSampled = 2;  // of each effect on each rank

struct Cut {
  int from;
  int to;
  int rank;  ///< of the new ones, the one that is struck
};

class ReshardFaults : public ::testing::TestWithParam<Cut> {
 protected:
  std::string path(const std::string& name) const { return scratch_.path() + "/" + name; }
  Job job(int ranks, EngineConfig::Resume resume) const {
    return {
        .ranks = ranks, .store = path("store"), .resume = resume, .watched = Job::Watched::kStore};
  }

  /// The old store is kept in a place of its own, with its state.
  void SetUp() override {
    Job old = job(GetParam().from, EngineConfig::Resume::kAuto);
    old.last_step = kStep;
    old.last_copy = path("old");
    ASSERT_EQ(trouble(run_job(old)), "");
    expected_[kStep] = tensors_of(path("old") + "/" + checkpoint_name(kStep));
    fs::copy(path("store"), path("kept"), fs::copy_options::recursive);
    const std::vector<RankReport> sound = reshard({});
    ASSERT_EQ(trouble(sound), "");
    for (const RankReport& rank : sound) calls_.push_back(rank.calls);
    expect_opened(sound);
    EXPECT_EQ(files(), static_cast<std::size_t>(GetParam().to)) << "nothing else is left";
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(path("store")), fs::directory_iterator()));
  }

  std::vector<RankReport> reshard(const Strike& strike) const {
    fs::remove_all(path("store"));
    fs::copy(path("kept"), path("store"), fs::copy_options::recursive);
    return start(GetParam().to, strike);
  }
  std::vector<RankReport> start(int ranks, const Strike& strike = {}) const {
    fs::remove_all(path("opened"));
    Job its = job(ranks, EngineConfig::Resume::kReshard);
    its.opened_copy = path("opened");
    return run_job(its, strike);
  }
  void expect_opened(const std::vector<RankReport>& ranks) const {
    for (const RankReport& rank : ranks) EXPECT_EQ(rank.opened, kStep);
    EXPECT_THAT(look_at_checkpoints(path("opened"), expected_).whole, ElementsAre(kStep));
  }

  /// Either it ends on all ranks, naming the file and what was wrong with it; or it goes on, where
  /// what could not be read is there twice, or is read again.
  void expect_named_or_right(const Strike& strike, const std::vector<RankReport>& ranks) {
    if (std::ranges::all_of(ranks, &RankReport::ended)) {
      ++went_on_;
      return expect_opened(ranks);
    }
    // Those that only follow refer to the one that met it.
    EXPECT_TRUE(std::ranges::none_of(ranks, &RankReport::ended)) << trouble(ranks);
    EXPECT_THAT(trouble(ranks), HasSubstr(path("store")));
    EXPECT_THAT(trouble(ranks), HasSubstr(errno_text(strike.error_number)));
  }

  /// Whether the call was made.
  bool strike_at(const Strike& strike) {
    const std::vector<RankReport> ranks = reshard(strike);
    for (const RankReport& rank : ranks) EXPECT_THAT(rank.problems, IsEmpty());
    const bool was_struck = struck(ranks);
    if (!was_struck) {
      EXPECT_EQ(trouble(ranks), "");
    } else if (strike.effect == Strike::Effect::kErrno) {
      expect_named_or_right(strike, ranks);
    } else {
      expect_killed(ranks, strike);
    }
    // Whoever comes next.
    const int next_ranks = strike.call % 2 == 0 ? GetParam().to : GetParam().from;
    const std::vector<RankReport> next = start(next_ranks);
    EXPECT_EQ(trouble(next), "") << trouble(ranks);
    expect_opened(next);
    EXPECT_EQ(files(), static_cast<std::size_t>(next_ranks)) << "nothing else is left";
    return was_struck;
  }

  void at_each_call(Strike strike) {
    strike.rank = GetParam().rank;
    const std::uint64_t struck =
        strike_calls(strike, calls_, kSampled, [this](const Strike& s) { return strike_at(s); });
    fmt::print("  {} to {} ranks, the last {}: {} calls struck of about {}; {} runs went on\n",
               GetParam().from, GetParam().to, to_string(strike), struck,
               calls_[static_cast<std::size_t>(strike.rank)], went_on_);
  }

  ScratchDirectory scratch_;
  States expected_;
  std::vector<std::uint64_t> calls_;  // of each new rank, in a sound run
  std::uint64_t went_on_ = 0;         // though a call had failed
};

TEST_P(ReshardFaults, ARankThatIsKilledLeavesOneOfTheTwoStoresWhole) {
  at_each_call({.effect = Strike::Effect::kKill});
}

TEST_P(ReshardFaults, AJobThatIsKilledLeavesOneOfTheTwoStoresWhole) {
  at_each_call({.effect = Strike::Effect::kKillAll});
}

TEST_P(ReshardFaults, ADriveThatIsFullLeavesOneOfTheTwoStoresWholeAndIsNamed) {
  at_each_call({.effect = Strike::Effect::kErrno, .error_number = ENOSPC});
}

TEST_P(ReshardFaults, ADriveThatFailsLeavesOneOfTheTwoStoresWholeAndIsNamed) {
  at_each_call({.effect = Strike::Effect::kErrno, .error_number = EIO});
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReshardFaults,
                         ::testing::Values(Cut{2, 3, 0}, Cut{2, 3, 1}, Cut{2, 3, 2}, Cut{3, 1, 0}),
                         [](const auto& its) {
                           return fmt::format("{}To{}Rank{}", its.param.from, its.param.to,
                                              its.param.rank);
                         });

}  // namespace
}  // namespace ziggurat::testing
