// SPDX-License-Identifier: Apache-2.0
// tests/base/worker_pool_test.cc: regions cover every tile once, barriers hold, jobs and regions
// make way for each other.
#include "base/runtime/worker_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <future>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ziggurat {
namespace worker_pool_test {

WorkerPoolOptions with_threads(std::size_t threads) {
  WorkerPoolOptions options;
  options.threads = threads;
  return options;
}

class Workers : public ::testing::TestWithParam<std::size_t> {
 protected:
  WorkerPool pool_{with_threads(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Threads, Workers, ::testing::Values(1, 2, 3, 4));

TEST_P(Workers, ForEachCoversEveryIndexOnce) {
  for (const std::size_t count : {0U, 1U, 2U, 7U, 1000U}) {
    std::vector<std::atomic<int>> seen(count);
    pool_.for_each(count, [&](std::size_t i) { ++seen[i]; });
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(seen[i], 1) << i << " of " << count;
  }
}

TEST_P(Workers, EveryWorkerRunsTheRegionOnceUnderItsOwnIndex) {
  std::mutex mutex;
  std::multiset<std::size_t> indices;
  std::set<std::thread::id> threads;
  pool_.run_team([&](Team& team) {
    EXPECT_EQ(team.size(), GetParam());
    const std::lock_guard lock(mutex);
    indices.insert(team.index());
    threads.insert(std::this_thread::get_id());
  });
  std::multiset<std::size_t> expected;
  for (std::size_t i = 0; i < GetParam(); ++i) expected.insert(i);
  EXPECT_EQ(indices, expected);
  EXPECT_EQ(threads.size(), GetParam());
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0U);
}

TEST_P(Workers, PhasesOfARegionDoNotOverlap) {
  constexpr std::size_t kPhases = 50;
  constexpr std::size_t kTiles = 9;
  std::atomic<std::size_t> finished{0};
  std::atomic<int> early{0};
  pool_.run_team([&](Team& team) {
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      team.for_each(kTiles, [&](std::size_t) {
        if (finished.load() < phase * kTiles) ++early;  // a tile of the phase before still runs
        ++finished;
      });
      if (finished.load() < (phase + 1) * kTiles) ++early;
      team.barrier();
    }
  });
  EXPECT_EQ(early, 0);
  EXPECT_EQ(finished, kPhases * kTiles);
}

TEST_P(Workers, WhatTilesWriteIsSeenByTheNextPhaseAndByTheCaller) {
  std::vector<std::uint64_t> a(512);
  std::vector<std::uint64_t> b(
      512);  // plain memory: the thread sanitizer checks the barrier's ordering
  pool_.run_team([&](Team& team) {
    team.for_each(a.size(), [&](std::size_t i) { a[i] = i; });
    team.for_each(b.size(), [&](std::size_t i) { b[i] = a[b.size() - 1 - i]; });
  });
  EXPECT_EQ(std::accumulate(b.begin(), b.end(), std::uint64_t{0}), 511U * 512U / 2U);
}

TEST_P(Workers, FirstExceptionOfABodyReachesTheCallerAfterEveryTileRan) {
  std::atomic<int> ran{0};
  try {
    pool_.for_each(20, [&](std::size_t i) {
      ++ran;
      if (i % 2 == 1) throw std::runtime_error("tile");
    });
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "tile");
  }
  EXPECT_EQ(ran, 20);
  pool_.for_each(5, [&](std::size_t) { ++ran; });  // the failure does not stick
  EXPECT_EQ(ran, 25);
}

TEST_P(Workers, JobsRunOnIdleWorkers) {
  std::promise<std::thread::id> ran_on;
  pool_.submit("job", [&] { ran_on.set_value(std::this_thread::get_id()); });
  EXPECT_NE(ran_on.get_future().get(), std::this_thread::get_id());
}

TEST_P(Workers, JobsRunBetweenTheTilesOfARegion) {
  // Tile 0 queues a job; a later tile waits for it. Were jobs held back until the region ends, this
  // would hang.
  std::atomic<bool> job_ran{false};
  pool_.run_team([&](Team& team) {
    team.for_each(1, [&](std::size_t) { pool_.submit("job", [&] { job_ran = true; }); });
    team.for_each(team.size(), [&](std::size_t) {});
    team.barrier();
  });
  pool_.for_each(1, [](std::size_t) {});
  EXPECT_TRUE(job_ran);
}

TEST(WorkersAtABarrier, WakeForAJobThoughTheyFellAsleep) {
  WorkerPool pool(with_threads(2));
  std::promise<void> job_ran;
  auto done = job_ran.get_future();
  pool.run_team([&](Team& team) {
    team.for_each(1, [&](std::size_t) {
      // The other worker is at the barrier and, after this, asleep. This tile ends only when the
      // job has run there.
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      pool.submit("job", [&] { job_ran.set_value(); });
      done.wait();
    });
  });
}

TEST(WorkersBetweenTiles, TakeOneJobATime) {
  // A queue that never empties must not keep a region from its end.
  std::atomic<bool> region_ended{false};
  std::atomic<int> jobs{0};
  std::function<void()> again;  // before the pool, whose destructor runs the last of them
  WorkerPool pool(with_threads(1));
  again = [&] {
    ++jobs;
    if (!region_ended) pool.submit("job", again);
  };
  pool.submit("job", again);
  pool.for_each(100, [](std::size_t) {});
  region_ended = true;
  EXPECT_GT(jobs, 0);
}

TEST(WorkersJobs, OfOneTurnKeepTheirOrderAndThoseThatAreWantedSoonGoFirstAndInTurns) {
  using enum WorkerPool::Turn;
  std::promise<void> go_on;
  std::string order;
  {
    WorkerPool pool(with_threads(1));
    std::promise<void> begun;
    pool.submit("job", [&] {
      begun.set_value();
      go_on.get_future().wait();
    });
    begun.get_future().wait();
    const auto submit = [&](char name, WorkerPool::Turn turn) {
      pool.submit(
          "job", [&order, name] { order += name; }, -1, turn);
    };
    submit('c', kInOrder);
    submit('a', kSoon);
    submit('d', kInOrder);
    submit('b', kSoon);
    go_on.set_value();
  }
  EXPECT_EQ(order, "acbd");
}

TEST_P(Workers, DestructorFinishesQueuedJobs) {
  std::atomic<int> ran{0};
  {
    WorkerPool pool(with_threads(GetParam()));
    for (int i = 0; i < 200; ++i) pool.submit("job", [&] { ++ran; });
  }
  EXPECT_EQ(ran, 200);
}

Task<> run_and_count(WorkerPool& pool, Reactor& reactor, int& resumed) {
  std::thread::id worker;
  const std::function<void()> job = [&] { worker = std::this_thread::get_id(); };
  co_await pool.run(reactor, {"job", 0}, job);
  EXPECT_NE(worker, std::thread::id());
  EXPECT_NE(worker, std::this_thread::get_id());
  EXPECT_TRUE(reactor.on_reactor_thread());
  ++resumed;
}

TEST_P(Workers, AwaitedJobResumesOnTheReactor) {
  Reactor reactor;
  WorkerPool pool(with_threads(GetParam()));  // goes before the reactor that its workers post to
  reactor.start();
  int resumed = 0;
  for (int i = 0; i < 50; ++i) reactor.block_on(run_and_count(pool, reactor, resumed));
  EXPECT_EQ(resumed, 50);
}

Task<> run_failing(WorkerPool& pool, Reactor& reactor) {
  const std::function<void()> job = [] { throw std::runtime_error("in the job"); };
  co_await pool.run(reactor, {"job", 0}, job);
}

TEST_P(Workers, AwaitedJobRethrowsWhatItThrew) {
  Reactor reactor;
  WorkerPool pool(with_threads(GetParam()));
  EXPECT_THROW(reactor.block_on(run_failing(pool, reactor)), std::runtime_error);
}

TEST_P(Workers, RegionsAndJobsMixWithoutLosingEither) {
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::atomic<int> jobs{0};
  std::atomic<bool> stop{false};
  std::thread submitter([&, jobs_seed = random()] {
    std::mt19937 mine(jobs_seed);
    for (int i = 0; i < 300; ++i) {
      pool_.submit("job", [&] { ++jobs; });
      if (mine() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 100));
    }
    stop = true;
  });
  std::size_t expected = 0;
  std::atomic<std::size_t> tiles{0};
  while (!stop) {
    const std::size_t phases = 1 + random() % 6;
    const std::size_t count = random() % 17;
    expected += phases * count;
    pool_.run_team([&](Team& team) {
      for (std::size_t p = 0; p < phases; ++p) team.for_each(count, [&](std::size_t) { ++tiles; });
    });
  }
  submitter.join();
  while (jobs < 300) std::this_thread::yield();
  EXPECT_EQ(tiles, expected);
}

/// Two workers on NUMA nodes 0 and 1, and jobs that say which of them ran them.
class WorkersOnTwoNodes : public ::testing::Test {
 protected:
  WorkersOnTwoNodes() {
    WorkerPoolOptions options = with_threads(2);
    options.nodes = {0, 1};
    options.metrics = &metrics_;
    pool_ = std::make_unique<WorkerPool>(std::move(options));
  }
  static std::string name_of_this_thread() {
    char name[16] = {};
    EXPECT_EQ(::pthread_getname_np(::pthread_self(), name, sizeof(name)), 0);
    return name;
  }
  /// Both workers at work, each with one of two jobs that end together with `release`.
  void keep_both_busy(std::shared_future<void> release) {
    std::promise<void> begun[2];
    for (std::promise<void>& one : begun) {
      pool_->submit("busy", [&one, release] {
        one.set_value();
        release.wait();
      });
    }
    for (std::promise<void>& one : begun) one.get_future().wait();
  }

  Metrics metrics_;
  std::unique_ptr<WorkerPool> pool_;
};

TEST_F(WorkersOnTwoNodes, TakeTheJobsOfTheirOwnNodeFirst) {
  std::promise<void> release;
  keep_both_busy(release.get_future().share());
  // One of each node, which run at the same time: so each worker has one, and chose it.
  std::promise<void> begun[2];
  std::shared_future<void> other[2] = {begun[1].get_future().share(),
                                       begun[0].get_future().share()};
  std::string ran_on[2];
  for (const std::size_t node : {1U, 0U}) {
    pool_->submit(
        "placed",
        [&, node] {
          ran_on[node] = name_of_this_thread();
          begun[node].set_value();
          other[node].wait();
        },
        static_cast<int>(node));
  }
  release.set_value();
  pool_.reset();
  EXPECT_EQ(ran_on[0], "zig-worker-0");
  EXPECT_EQ(ran_on[1], "zig-worker-1");
  EXPECT_EQ(metrics_.value(Counter::kJobsOnNode), 2U);
  EXPECT_EQ(metrics_.value(Counter::kJobsElsewhere), 0U);
}

TEST_F(WorkersOnTwoNodes, HelpTheOtherNodeWhenTheyHaveNothingToDo) {
  std::promise<void> release;
  std::promise<std::string> busy_on;
  pool_->submit("busy", [&, released = release.get_future().share()] {
    busy_on.set_value(name_of_this_thread());
    released.wait();
  });
  const std::string busy = busy_on.get_future().get();
  std::promise<std::string> ran_on;
  pool_->submit(
      "placed", [&] { ran_on.set_value(name_of_this_thread()); }, busy == "zig-worker-0" ? 0 : 1);
  EXPECT_NE(ran_on.get_future().get(), busy) << "the node's only worker is busy";
  release.set_value();
  pool_.reset();
  EXPECT_EQ(metrics_.value(Counter::kJobsElsewhere), 1U);
}

TEST_F(WorkersOnTwoNodes, LeaveTheOtherNodesJobsAloneBetweenTiles) {
  std::atomic<bool> job_ran{false};
  std::atomic<bool> looked{false};
  std::atomic<int> tiles_of_first{0};
  bool ran_too_soon = false;
  pool_->run_team([&](Team& team) {
    if (team.index() == 0)
      pool_->submit(
          "placed", [&] { job_ran = true; }, 1);
    // The second worker is in a tile while the first passes from tile to tile, and not idle.
    team.for_each(20, [&](std::size_t) {
      if (team.index() == 0) {
        if (++tiles_of_first == 8) looked.wait(false);
      } else if (!looked) {
        while (tiles_of_first < 8) std::this_thread::yield();
        ran_too_soon = job_ran;
        looked = true;
        looked.notify_all();
      }
    });
  });
  pool_.reset();
  EXPECT_FALSE(ran_too_soon);
  EXPECT_TRUE(job_ran);
}

TEST_F(WorkersOnTwoNodes, RunAnyJobThatNamesNoNodeOrOneWithoutWorkers) {
  std::atomic<int> ran{0};
  for (const int node : {-1, 5, -1, 5})
    pool_->submit(
        "job", [&] { ++ran; }, node);
  pool_.reset();
  EXPECT_EQ(ran, 4);
  EXPECT_EQ(metrics_.value(Counter::kJobsOnNode) + metrics_.value(Counter::kJobsElsewhere), 0U);
}

TEST_F(WorkersOnTwoNodes, LoseNoJobWhateverElseTheyDo) {
  std::atomic<int> ran{0};
  constexpr int kJobs = 2000;
  std::thread submits([&] {
    for (int i = 0; i < kJobs; ++i)
      pool_->submit(
          "job", [&] { ++ran; }, i % 3 - 1);
  });
  for (int region = 0; region < 200; ++region) pool_->for_each(7, [](std::size_t) {});
  submits.join();
  pool_.reset();
  EXPECT_EQ(ran, kJobs);
}

TEST(WorkerFloatingPoint, IsOursWhateverTheEmbeddersThreadHasSet) {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U | 0x6000U);  // flush-to-zero, denormals-are-zero, round toward zero
  WorkerPool pool(with_threads(2));
  _mm_setcsr(before);
  std::vector<unsigned> seen(2);
  pool.run_team(
      [&](Team& team) { seen[team.index()] = _mm_getcsr() & ~0x3fU; });  // without sticky flags
  EXPECT_EQ(seen, (std::vector<unsigned>{0x1f80U, 0x1f80U}));
#else
  GTEST_SKIP() << "the control register is x86's";
#endif
}

TEST(WorkerPinning, UsesTheCpusGiven) {
  cpu_set_t usable;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(usable), &usable), 0);
  int first = 0;
  while (!CPU_ISSET(static_cast<unsigned>(first), &usable)) ++first;
  WorkerPoolOptions options = with_threads(1);
  options.cpus = {first};
  WorkerPool pool(std::move(options));
  pool.run_team([&](Team&) {
    cpu_set_t mine;
    ASSERT_EQ(::sched_getaffinity(0, sizeof(mine), &mine), 0);
    EXPECT_EQ(CPU_COUNT(&mine), 1);
    EXPECT_TRUE(CPU_ISSET(static_cast<unsigned>(first), &mine));
  });
}

}  // namespace worker_pool_test
}  // namespace ziggurat
