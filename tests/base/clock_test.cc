// SPDX-License-Identifier: Apache-2.0
// tests/base/clock_test.cc: order of timers; virtual time jumps, real time does not.
#include "base/runtime/clock.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/runtime/seconds.h"

namespace ziggurat {
namespace clock_test {

TEST(VirtualClock, JumpsToTheEarliestDeadlineAndKeepsTheOrderOfEqualOnes) {
  Clock clock(Clock::Kind::kVirtual);
  std::vector<int> fired;
  clock.after(Nanoseconds(20), [&] { fired.push_back(3); });
  clock.after(Nanoseconds(10), [&] { fired.push_back(1); });
  clock.after(Nanoseconds(10), [&] { fired.push_back(2); });
  EXPECT_EQ(clock.next_deadline(), Nanoseconds(10));
  EXPECT_EQ(clock.now(), Nanoseconds(0));
  EXPECT_TRUE(clock.run_next_due());
  EXPECT_EQ(clock.now(), Nanoseconds(10));
  EXPECT_TRUE(clock.run_next_due());
  EXPECT_TRUE(clock.run_next_due());
  EXPECT_EQ(clock.now(), Nanoseconds(20));
  EXPECT_FALSE(clock.run_next_due());
  EXPECT_EQ(clock.next_deadline(), std::nullopt);
  EXPECT_EQ(fired, (std::vector<int>{1, 2, 3}));
}

TEST(VirtualClock, NeverRunsBackwards) {
  Clock clock(Clock::Kind::kVirtual);
  clock.after(Nanoseconds(10), [] {});
  clock.run_next_due();
  clock.after(Nanoseconds(-5), [] {});
  clock.run_next_due();
  EXPECT_EQ(clock.now(), Nanoseconds(10));
}

TEST(VirtualClock, ActionMayScheduleAnother) {
  Clock clock(Clock::Kind::kVirtual);
  int fired = 0;
  clock.after(Nanoseconds(1), [&] { clock.after(Nanoseconds(1), [&] { fired = 1; }); });
  EXPECT_TRUE(clock.run_next_due());
  EXPECT_TRUE(clock.run_next_due());
  EXPECT_EQ(fired, 1);
  EXPECT_EQ(clock.now(), Nanoseconds(2));
}

TEST(RealClock, DoesNotRunWhatIsNotDue) {
  Clock clock(Clock::Kind::kReal);
  bool fired = false;
  clock.after(std::chrono::hours(1), [&] { fired = true; });
  EXPECT_FALSE(clock.run_next_due());
  EXPECT_FALSE(fired);
  clock.after(Nanoseconds(0), [&] { fired = true; });
  EXPECT_TRUE(clock.run_next_due());
  EXPECT_TRUE(fired);
}

/// A setting may say any number of seconds, also one that no clock can count.
TEST(Seconds, ThatNoClockCountsAreTheLongestWait) {
  EXPECT_EQ(nanoseconds_of(0.25), Nanoseconds(250'000'000));
  EXPECT_EQ(nanoseconds_of(60), std::chrono::minutes(1));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double seconds : {1e10, 1e12, 1e300, kInfinity})
    EXPECT_EQ(nanoseconds_of(seconds), kLongestWait) << seconds;
  for (const double seconds : {0.0, -1.0, -kInfinity, std::nan("")})
    EXPECT_EQ(nanoseconds_of(seconds), Nanoseconds(0)) << seconds;
}

TEST(Seconds, OfTheLongestWaitHaveADeadlineThatHasNotPassed) {
  Clock clock(Clock::Kind::kReal);
  bool fired = false;
  clock.after(kLongestWait, [&] { fired = true; });
  EXPECT_FALSE(clock.run_next_due());
  EXPECT_FALSE(fired);
}

TEST(RealClock, IsMonotonic) {
  const Clock clock(Clock::Kind::kReal);
  const Nanoseconds first = clock.now();
  EXPECT_GE(clock.now().count(), first.count());
}

}  // namespace clock_test
}  // namespace ziggurat
