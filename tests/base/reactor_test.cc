// SPDX-License-Identifier: Apache-2.0
// tests/base/reactor_test.cc: block_on with and without the engine thread, order under virtual
// time, lock-ups.
#include "base/runtime/reactor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"

namespace ziggurat {
namespace reactor_test {

Task<int> answer() { co_return 42; }
Task<> fail() {
  throw Error(ErrorCode::kDataLoss, "gone");
  co_return;
}
Task<std::thread::id> where() { co_return std::this_thread::get_id(); }

TEST(Reactor, BlockOnWithoutAThreadRunsOnTheCallers) {
  Reactor reactor;
  EXPECT_EQ(reactor.block_on(answer()), 42);
  EXPECT_EQ(reactor.block_on(where()), std::this_thread::get_id());
  EXPECT_FALSE(reactor.on_reactor_thread());
}

TEST(Reactor, BlockOnWithTheEngineThreadRunsThere) {
  Reactor reactor;
  reactor.start();
  EXPECT_EQ(reactor.block_on(answer()), 42);
  EXPECT_NE(reactor.block_on(where()), std::this_thread::get_id());
  EXPECT_FALSE(reactor.on_reactor_thread());
}

TEST(Reactor, BlockOnRethrowsWhatTheTaskThrew) {
  for (const bool started : {false, true}) {
    Reactor reactor;
    if (started) reactor.start();
    try {
      reactor.block_on(fail());
      FAIL() << "no exception";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    }
    EXPECT_EQ(reactor.block_on(answer()), 42) << "usable afterwards";
  }
}

TEST(Reactor, DestroysOnItsOwnThread) {
  struct Tells {
    std::thread::id& where;
    ~Tells() { where = std::this_thread::get_id(); }
  };
  Reactor reactor;
  reactor.start();
  std::thread::id where;
  std::unique_ptr<Tells> object(new Tells{where});
  reactor.destroy(object);
  EXPECT_EQ(object, nullptr);
  EXPECT_NE(where, std::thread::id());
  EXPECT_NE(where, std::this_thread::get_id());
  reactor.destroy(object);  // nothing is there
}

TEST(Reactor, SpawnGivesTheErrorToItsHandlerOnTheReactorsThread) {
  Reactor reactor;
  reactor.start();
  std::promise<bool> on_thread;
  reactor.spawn(fail(), [&](std::exception_ptr error) {
    EXPECT_THROW(std::rethrow_exception(error), Error);
    on_thread.set_value(reactor.on_reactor_thread());
  });
  EXPECT_TRUE(on_thread.get_future().get());
}

TEST(Reactor, PostsFromManyThreadsAllRunOnOne) {
  Reactor reactor;
  reactor.start();
  constexpr int kThreads = 4;
  constexpr int kPosts = 500;
  int ran = 0;  // no lock: every increment is on the reactor's thread
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kPosts; ++i) reactor.post([&ran] { ++ran; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  reactor.stop();  // posted last, so everything before it has run
  EXPECT_EQ(ran, kThreads * kPosts);
}

TEST(Reactor, StartsAgainAfterStop) {
  Reactor reactor;
  for (int i = 0; i < 3; ++i) {
    reactor.start();
    EXPECT_EQ(reactor.block_on(answer()), 42);
    reactor.stop();
  }
  EXPECT_EQ(reactor.block_on(answer()), 42);
}

Task<> pause(Reactor& reactor, Nanoseconds delay) {
  Signal passed(reactor);
  reactor.clock().after(delay, [&passed] { passed.set(); });
  co_await passed.wait();
}

Task<> stamp(Reactor& reactor, Nanoseconds delay, std::string name, std::vector<std::string>& log) {
  co_await pause(reactor, delay);
  log.push_back(name + "@" + std::to_string(reactor.clock().now().count()));
}

TEST(Reactor, VirtualTimeJumpsFromTimerToTimerInOrder) {
  Reactor reactor(Clock::Kind::kVirtual);
  std::vector<std::string> log;
  const auto ignore = [](std::exception_ptr) {};
  reactor.spawn(stamp(reactor, std::chrono::hours(1), "late", log), ignore);
  reactor.spawn(stamp(reactor, Nanoseconds(5), "b", log), ignore);
  reactor.spawn(stamp(reactor, Nanoseconds(5), "c", log), ignore);
  reactor.spawn(stamp(reactor, Nanoseconds(1), "a", log), ignore);
  reactor.run_until_idle();
  EXPECT_EQ(log, (std::vector<std::string>{"a@1", "b@5", "c@5", "late@3600000000000"}));
}

TEST(Reactor, VirtualTimeStandsStillWhileHandlersAreReady) {
  Reactor reactor(Clock::Kind::kVirtual);
  std::vector<std::string> log;
  reactor.clock().after(Nanoseconds(1), [&] { log.push_back("timer"); });
  int left = 100;
  std::function<void()> again = [&] {
    if (--left > 0) reactor.post(again);
    log.push_back(std::to_string(reactor.clock().now().count()));
  };
  reactor.post(again);
  reactor.run_until_idle();
  ASSERT_EQ(log.size(), 101U);
  EXPECT_EQ(log[99], "0");
  EXPECT_EQ(log[100], "timer");
}

TEST(Reactor, RealTimersFireAmongHandlersThatKeepPosting) {
  Reactor reactor;
  bool fired = false;
  reactor.clock().after(Nanoseconds(0), [&] { fired = true; });
  std::function<void()> again = [&] {
    if (!fired) reactor.post(again);
  };
  reactor.post(again);
  reactor.block_on(answer());
  reactor.run_until_idle();
  EXPECT_TRUE(fired);
}

TEST(Reactor, RealTimerIsNotEarly) {
  Reactor reactor;
  reactor.start();
  const Nanoseconds delay = std::chrono::milliseconds(3);
  const Nanoseconds begin = monotonic_now();
  reactor.block_on(pause(reactor, delay));
  EXPECT_GE((monotonic_now() - begin).count(), delay.count());
}

Task<> wait_for(Signal& signal) { co_await signal.wait(); }

TEST(Reactor, StallHandlersTurnALockUpIntoAnError) {
  for (const bool started : {false, true}) {
    Reactor reactor;
    if (started) reactor.start();
    Signal never(reactor);
    reactor.on_stall([&never] {
      never.fail(
          std::make_exception_ptr(Error(ErrorCode::kResourceExhausted, "a circle of leases")));
    });
    try {
      reactor.block_on(wait_for(never));
      FAIL() << "no exception";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "a circle of leases");
    }
  }
}

TEST(Reactor, WaitingForWorkElsewhereIsNoLockUp) {
  Reactor reactor;
  Signal done(reactor);
  bool stalled = false;
  reactor.on_stall([&] { stalled = true; });
  reactor.external_begin();
  std::thread elsewhere([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    reactor.post([&] {
      reactor.external_end();
      done.set();
    });
  });
  reactor.block_on(wait_for(done));
  elsewhere.join();
  EXPECT_FALSE(stalled);
}

// A worker's job takes no virtual time, however long the worker takes.
TEST(Reactor, VirtualTimeStandsStillWhileWorkIsUnderWayElsewhere) {
  for (const bool started : {false, true}) {
    Reactor reactor(Clock::Kind::kVirtual);
    if (started) reactor.start();
    std::vector<std::string> log;
    std::promise<void> begun;
    std::thread elsewhere([&] {
      begun.get_future().wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // a clock that jumps does so now
      reactor.post([&] {
        reactor.external_end();
        log.push_back("work@" + std::to_string(reactor.clock().now().count()));
      });
    });
    reactor.block_on(
        [](Reactor& its, std::vector<std::string>& notes, std::promise<void>& now) -> Task<> {
          its.external_begin();
          its.clock().after(Nanoseconds(0), [&] { notes.push_back("at once"); });
          now.set_value();
          co_await stamp(its, std::chrono::hours(1), "timer", notes);
        }(reactor, log, begun));
    elsewhere.join();
    EXPECT_EQ(log, (std::vector<std::string>{"at once", "work@0", "timer@3600000000000"}));
  }
}

TEST(Reactor, WaitingForATimerIsNoLockUp) {
  for (const Clock::Kind kind : {Clock::Kind::kReal, Clock::Kind::kVirtual}) {
    Reactor reactor(kind);
    bool stalled = false;
    reactor.on_stall([&] { stalled = true; });
    reactor.block_on(pause(reactor, std::chrono::milliseconds(2)));
    EXPECT_FALSE(stalled);
  }
}

Task<> note(Reactor& reactor, Signal& go, int number, std::vector<int>& order) {
  co_await go.wait();
  order.push_back(number);
  co_await pause(reactor, Nanoseconds(1));
  order.push_back(10 + number);
}

std::vector<int> order_of_eight(std::uint64_t seed) {
  Reactor reactor(Clock::Kind::kVirtual);
  reactor.shuffle_ready(seed);
  Signal go(reactor);
  WorkGroup group(reactor);
  std::vector<int> order;
  for (int number = 0; number < 8; ++number) group.spawn(note(reactor, go, number, order));
  reactor.post([&] { go.set(); });
  reactor.block_on(group.wait_idle());
  EXPECT_EQ(reactor.clock().now(), Nanoseconds(1)) << "what is ready comes before any timer";
  return order;
}

TEST(Reactor, ShufflesWhatIsReadyBySeed) {
  const std::vector<int> in_order = order_of_eight(0);
  EXPECT_EQ(in_order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17}));
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::vector<int> order = order_of_eight(seed);
    EXPECT_EQ(order, order_of_eight(seed)) << "seed " << seed;
    orders.insert(order);
    std::ranges::sort(order);
    EXPECT_EQ(order, in_order) << "each once; seed " << seed;
  }
  EXPECT_GT(orders.size(), 18U);
}

TEST(Reactor, ALockUpIsFoundWhereReadyHandlersAreShuffled) {
  Reactor reactor(Clock::Kind::kVirtual);
  reactor.shuffle_ready(3);
  Signal never(reactor);
  reactor.on_stall(
      [&] { never.fail(std::make_exception_ptr(Error(ErrorCode::kCancelled, "a lock-up"))); });
  EXPECT_THROW(reactor.block_on(wait_for(never)), Error);
}

TEST(Reactor, IdleReactorWithNobodyBlockedIsNoLockUp) {
  std::atomic<bool> stalled{false};
  Reactor reactor;
  reactor.on_stall([&] { stalled = true; });
  reactor.start();
  reactor.block_on(answer());
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  reactor.stop();
  EXPECT_FALSE(stalled);
}

using ReactorDeathTest = ::testing::Test;

TEST(ReactorDeathTest, BlockingOnItsOwnThreadIsABrokenInvariant) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Reactor reactor;
        reactor.post([&] { reactor.block_on(answer()); });
        reactor.run_until_idle();
      },
      "a blocking call on the reactor's own thread");
}

TEST(ReactorDeathTest, LockUpThatNoHandlerResolvesIsABrokenInvariant) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Reactor reactor;
        Signal never(reactor);
        reactor.block_on(wait_for(never));
      },
      "nothing is in flight");
}

}  // namespace reactor_test
}  // namespace ziggurat
