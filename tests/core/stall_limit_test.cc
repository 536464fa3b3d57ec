// SPDX-License-Identifier: Apache-2.0
// tests/core/stall_limit_test.cc: all waits together have one limit, and what is no wait has none.
#include "core/engine/state/stall_limit.h"

#include <gtest/gtest.h>

#include "base/runtime/seconds.h"

namespace ziggurat {
namespace stall_limit_test {

using std::chrono::seconds;

class Stall : public ::testing::Test {
 protected:
  /// Time passes, and nothing else happens.
  void pass(Nanoseconds time) {
    bool over = false;
    clock_.after(time, [&over] { over = true; });
    while (!over) clock_.run_next_due();
  }
  void wait(Nanoseconds time) {
    limit_.begin();
    pass(time);
    limit_.end();
  }

  Clock clock_{Clock::Kind::kVirtual};
  int reached_ = 0;
  Nanoseconds reached_at_{0};
  StallLimit limit_{clock_, seconds(10), [this] {
                      ++reached_;
                      reached_at_ = clock_.now();
                    }};
};

TEST_F(Stall, IsTheSumOfWaitsHoweverShortEachIs) {
  for (int i = 0; i < 3; ++i) {
    wait(seconds(3));
    pass(seconds(100));
  }
  EXPECT_EQ(limit_.stalled(), seconds(9));
  EXPECT_EQ(reached_, 0);
  wait(seconds(3));
  EXPECT_EQ(reached_, 1);
  EXPECT_EQ(reached_at_, seconds(309 + 1));
  EXPECT_EQ(limit_.stalled(), seconds(12));
}

TEST_F(Stall, CountsWaitsAtATimeOnce) {
  limit_.begin();
  pass(seconds(2));
  limit_.begin();
  pass(seconds(2));
  EXPECT_FALSE(limit_.end());
  pass(seconds(2));
  EXPECT_TRUE(limit_.end());
  EXPECT_EQ(limit_.stalled(), seconds(6));
}

TEST_F(Stall, IsReachedOnceAtMost) {
  wait(seconds(30));
  wait(seconds(30));
  EXPECT_EQ(reached_, 1);
  EXPECT_EQ(reached_at_, seconds(10));
}

TEST_F(Stall, WithoutAWaitReachesNothing) {
  wait(seconds(9));
  pass(seconds(1000));
  EXPECT_EQ(reached_, 0);
}

TEST_F(Stall, WithTheLongestLimitIsNeverReached) {
  bool reached = false;
  StallLimit endless(clock_, nanoseconds_of(1e300), [&reached] { reached = true; });
  endless.begin();
  pass(std::chrono::hours(1'000));
  EXPECT_TRUE(endless.end());
  EXPECT_FALSE(reached);
}

}  // namespace stall_limit_test
}  // namespace ziggurat
