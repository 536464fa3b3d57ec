// SPDX-License-Identifier: Apache-2.0
// tests/tiers/driver_watch_test.cc: a driver that does not come back ends the process, with a
// message that says which call it was.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/bytes.h"
#include "tiers/device/driver_watch.h"

namespace ziggurat {
namespace driver_watch_test {

using std::chrono::hours;
using std::chrono::milliseconds;

void sleep_for_ever() { std::this_thread::sleep_for(hours(1)); }

TEST(DriverWatchDeathTest, a_call_that_does_not_come_back_ends_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto stuck = [] {
    DriverWatch watch("cuda3 (a GPU)", {.call = milliseconds(100), .after_loss = hours(1)});
    const DriverWatch::Call call(watch, "cudaEventSynchronize", 4 * kMiB);
    sleep_for_ever();
  };
  EXPECT_EXIT(stuck(), ::testing::ExitedWithCode(1),
              "cuda3 \\(a GPU\\): cudaEventSynchronize of 4.0 MiB has not come back from the "
              "driver for 0\\.[0-9] s");
}

TEST(DriverWatchDeathTest, after_a_loss_a_wait_has_less_time) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto stuck = [] {
    DriverWatch watch("cuda3 (a GPU)", {.call = hours(1), .after_loss = milliseconds(100)});
    const DriverWatch::Call call(watch, "cudaStreamSynchronize", 0);
    watch.lost("it fell off the bus");
    sleep_for_ever();
  };
  EXPECT_EXIT(stuck(), ::testing::ExitedWithCode(1),
              "cudaStreamSynchronize has not come back .*it fell off the bus");
}

TEST(DriverWatch, calls_that_come_back_in_time_are_let_go) {
  DriverWatch watch("cuda3 (a GPU)", {.call = milliseconds(400), .after_loss = hours(1)});
  for (int i = 0; i < 12; ++i) {
    const DriverWatch::Call call(watch, "cudaMemcpyAsync", 1);
    std::this_thread::sleep_for(milliseconds(50));
  }
}

/// A call under way, in a process that is stopped for longer than the call may take.
[[noreturn]] void stopped_in_a_call(DriverDeadlines deadlines, bool lost) {
  DriverWatch watch("cuda3 (a GPU)", deadlines);
  {
    const DriverWatch::Call call(watch, "cudaMemcpyAsync", 1);
    if (lost) watch.lost("it fell off the bus");
    std::this_thread::sleep_for(milliseconds(200));  // it watches
    ::raise(SIGSTOP);
    std::this_thread::sleep_for(milliseconds(1000));  // it looks, and finds much time gone
  }
  ::_exit(0);
}

TEST(DriverWatchDeathTest, the_time_in_which_the_process_was_stopped_is_not_the_drivers) {
  for (const bool lost : {false, true}) {
    SCOPED_TRACE(lost);
    const DriverDeadlines deadlines{.call = lost ? hours(1) : milliseconds(3000),
                                    .after_loss = lost ? milliseconds(3000) : hours(1)};
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) stopped_in_a_call(deadlines, lost);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(status));
    std::this_thread::sleep_for(milliseconds(4500));
    ASSERT_EQ(::kill(child, SIGCONT), 0);
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace driver_watch_test
}  // namespace ziggurat
