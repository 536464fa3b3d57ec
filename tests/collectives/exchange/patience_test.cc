// SPDX-License-Identifier: Apache-2.0
// tests/collectives/exchange/patience_test.cc: who is waited for and who is not, over hours that
// pass at once.
#include "collectives/exchange/patience.h"

#include <gmock/gmock.h>

#include <chrono>
#include <string>
#include <vector>

namespace ziggurat {
namespace patience_test {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr Nanoseconds kTimeout = 10min;

/// What a rank does while others wait: it finishes work until it stops to, answers until it stops
/// to, and waits for the others itself from some time on.
struct Rank {
  Nanoseconds works_until{0};
  Nanoseconds answers_until{1000h};
  Nanoseconds waits_from{0};
};

struct Verdict {
  Nanoseconds at{0};
  std::string text;  // empty: there was none
};

/// The first verdict of any rank that waits, until `end`.
Verdict wait(const std::vector<Rank>& ranks, Nanoseconds end) {
  std::vector<Patience> patience(ranks.size(), Patience(ranks.size(), kTimeout));
  std::vector<bool> waits(ranks.size());
  const Nanoseconds period = patience[0].period();
  const auto work_at = [&](std::size_t rank, Nanoseconds now) {
    return static_cast<std::uint64_t>(std::min(now, ranks[rank].works_until) / 1s);
  };
  for (std::size_t i = 0; i < ranks.size(); ++i) patience[i].left(i);  // nobody asks itself
  for (Nanoseconds now{0}; now <= end; now += period) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (now < ranks[i].waits_from || now >= ranks[i].answers_until) continue;
      if (!waits[i]) patience[i].begin(now);
      waits[i] = true;
      patience[i].tick(now, work_at(i, now));
      if (const auto text = patience[i].verdict()) return {now, *text};
      for (std::size_t other = 0; other < ranks.size(); ++other) {
        if (now < ranks[other].answers_until) patience[i].answered(other, work_at(other, now));
      }
    }
  }
  return {};
}

TEST(Patience, ARankThatFillsItsStoreForHoursIsWaitedFor) {
  const Rank fast{.works_until = 1h, .waits_from = 1h};
  const Rank slow{.works_until = 5h, .waits_from = 5h};
  EXPECT_EQ(wait({fast, slow}, 5h).text, "");
}

// Rank 0 waits for rank 1, which waits for rank 2 itself.
TEST(Patience, SoAreThoseWhoWaitForIt) {
  const Rank slow{.works_until = 5h, .waits_from = 5h};
  EXPECT_EQ(wait({{}, {.waits_from = 1s}, slow}, 5h).text, "");
}

TEST(Patience, RanksThatOnlyWaitForEachOtherAreEndedAfterTheTimeout) {
  const Verdict verdict = wait({{}, {}, {}}, 1h);
  EXPECT_THAT(verdict.text, HasSubstr("none has finished any work in the 600.0 s"));
  EXPECT_GE(verdict.at, kTimeout);
  EXPECT_LE(verdict.at, kTimeout + 2s);
}

TEST(Patience, ADriveThatHangsInTheThirdHourIsMissedAfterTheTimeout) {
  const Verdict verdict = wait({{}, {.works_until = 3h, .waits_from = 100h}}, 4h);
  EXPECT_THAT(verdict.text, HasSubstr("stands still"));
  EXPECT_GE(verdict.at, 3h + kTimeout);
  EXPECT_LE(verdict.at, 3h + kTimeout + 2s);
}

TEST(Patience, AProcessThatIsStoppedIsMissedInHalfTheTimeAndNamed) {
  const Rank stopped{.works_until = 2h, .answers_until = 1h, .waits_from = 100h};
  const Verdict verdict = wait({{}, {.works_until = 5h, .waits_from = 100h}, stopped}, 3h);
  EXPECT_THAT(verdict.text, HasSubstr("rank 2 has not answered for 30"));
  EXPECT_LE(verdict.at, 1h + kTimeout / 2 + 2s);
}

TEST(Patience, ACallThatMovesIsNoStandstill) {
  Patience patience(2, kTimeout);
  patience.left(0);
  patience.begin(0s);
  for (Nanoseconds now = 1s; now < 2h; now += 1s) {
    patience.tick(now, 0);
    patience.answered(1, 7);
    if (now % 60s == 0s) patience.moved();
    EXPECT_FALSE(patience.verdict());
  }
}

// Then its own ticks are late, and nobody else's answers.
TEST(Patience, TheTimeThatThisRankWasStoppedItselfIsNobodysSilence) {
  Patience patience(2, kTimeout);
  patience.left(0);
  patience.begin(0s);
  patience.tick(1s, 0);
  patience.answered(1, 1);
  patience.tick(3h, 0);
  EXPECT_FALSE(patience.verdict());
}

TEST(Patience, ARankThatSaidGoodbyeIsNotMissed) {
  Patience patience(3, kTimeout);
  patience.left(0);
  patience.left(2);
  patience.begin(0s);
  for (Nanoseconds now = 1s; now < 599s; now += 1s) {
    patience.tick(now, 0);
    patience.answered(1, 1);
  }
  EXPECT_FALSE(patience.verdict());
}

TEST(Patience, ManyRanksAskEachOtherLessOften) {
  EXPECT_EQ(Patience(2, kTimeout).period(), 1s);
  EXPECT_EQ(Patience(640, kTimeout).period(), 10s);
  EXPECT_EQ(Patience(2, 200ms).period(), 25ms);
}

}  // namespace patience_test
}  // namespace ziggurat
