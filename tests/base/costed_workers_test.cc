// SPDX-License-Identifier: Apache-2.0
// tests/base/costed_workers_test.cc: what jobs cost on twins of workers, which of them run, and
// addresses without memory.
#include "base/runtime/costed_workers.h"

#include <gtest/gtest.h>

#include "base/absent_memory.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/for_each.h"

namespace ziggurat {
namespace {

using namespace std::chrono_literals;

class CostedWorkersTest : public ::testing::Test {
 protected:
  Reactor reactor_{Clock::Kind::kVirtual};
  CostedWorkers workers_{reactor_, {.threads = 2, .bytes_per_second = 2e9, .latency = 10ns}};
};

TEST_F(CostedWorkersTest, EachWorkerHasItsShareOfTheBandwidth) {
  const std::function<void()> job = [] {};
  const std::function<Task<>(std::size_t)> run = [&](std::size_t) {
    return workers_.run(reactor_, {"job", 1000}, job);
  };
  reactor_.block_on(for_each_index(reactor_, 5, 5, run));
  EXPECT_EQ(reactor_.clock().now(), 3 * 1010ns);  // five jobs of 1,000 bytes on two workers
  EXPECT_EQ(workers_.busy(), 5 * 1010ns);
}

TEST_F(CostedWorkersTest, MoreThreadsThanCoresAllGetAnEqualPart) {
  CostedWorkers workers(reactor_, {.threads = 2, .cores = 3, .bytes_per_second = 2e9});
  const std::function<void()> job = [] {};
  WorkGroup group(reactor_);
  for (int i = 0; i < 2; ++i) group.spawn(workers.run(reactor_, {"job", 750'000}, job));
  group.spawn(workers.compute_beside(2ms, 2));
  reactor_.block_on(group.wait_idle());
  // Four threads on three cores have three quarters of one each, for the first millisecond of work.
  EXPECT_EQ(reactor_.clock().now(), 1'333'333ns + 1ms);
  EXPECT_EQ(workers.busy(), 1500us);
}

/// With a look at the others each millisecond this would take half an hour.
TEST_F(CostedWorkersTest, PlaysDaysAtOnce) {
  CostedWorkers workers(reactor_, {.threads = 2, .bytes_per_second = 2e9});
  const std::function<void()> job = [] {};
  WorkGroup group(reactor_);
  group.spawn(workers.compute_beside(std::chrono::hours(240), 2));
  group.spawn(workers.run(reactor_, {"job", 1'000'000}, job));
  reactor_.block_on(group.wait_idle());
  EXPECT_GE(reactor_.clock().now(), std::chrono::hours(240));
  EXPECT_LE(reactor_.clock().now(), std::chrono::hours(241));
}

/// Two jobs at a time: the third begins when the first has ended.
TEST_F(CostedWorkersTest, NotesWhatJobsReadAndWrite) {
  const std::vector<std::byte> memory(300);
  const std::span<const std::byte> all(memory);
  const auto conflicts = [&](const Work& one, const Work& other, const Work& third) {
    AccessLedger ledger;
    CostedWorkers workers(reactor_, {.threads = 2, .bytes_per_second = 2e9, .ledger = &ledger});
    const std::function<void()> job = [] {};
    WorkGroup group(reactor_);
    for (const Work& work : {one, other, third}) group.spawn(workers.run(reactor_, work, job));
    reactor_.block_on(group.wait_idle());
    EXPECT_EQ(ledger.under_way(), 0U);
    return ledger.conflicts().size();
  };
  const Work reads{.name = "reads", .bytes = 100, .read = all.first(200)};
  const Work writes{.name = "writes", .bytes = 200, .written = all.subspan(100, 100)};
  const Work both{
      .name = "both", .bytes = 300, .read = all.last(100), .also_written = all.first(100)};
  EXPECT_EQ(conflicts(reads, reads, reads), 0U);
  EXPECT_EQ(conflicts(reads, writes, both), 1U);
  EXPECT_EQ(conflicts(reads, both, writes), 1U);
  EXPECT_EQ(conflicts(writes, both, reads), 1U);
}

TEST_F(CostedWorkersTest, RunsOnlyWhatDecidesSomething) {
  int ran = 0;
  const std::function<void()> job = [&] { ++ran; };
  reactor_.block_on(workers_.run(reactor_, {"job", 8}, job));
  EXPECT_EQ(ran, 0);
  reactor_.block_on(workers_.run(reactor_, {"job", 8, true}, job));
  EXPECT_EQ(ran, 1);
  const std::function<void()> fails = [] { throw Error(ErrorCode::kDataLoss, "lost"); };
  EXPECT_THROW(reactor_.block_on(workers_.run(reactor_, {"job", 8, true}, fails)), Error);
}

TEST_F(CostedWorkersTest, JobsThatOthersWaitForTakeTurnsWithThoseInOrder) {
  std::vector<std::pair<char, std::function<void()>>> jobs;
  std::string order;
  for (const char name : {'a', 'b', 'c', 'd', 'X', 'Y'})
    jobs.emplace_back(name, [&order, name] { order += name; });
  const std::function<Task<>(std::size_t)> run = [&](std::size_t i) {
    const auto& [name, job] = jobs[i];
    const bool soon = name >= 'X' && name <= 'Y';
    return workers_.run(reactor_, {"job", 1000, true}, job, -1,
                        soon ? Workers::Turn::kSoon : Workers::Turn::kInOrder);
  };
  reactor_.block_on(for_each_index(reactor_, jobs.size(), jobs.size(), run));
  EXPECT_EQ(order, "abXcYd");
}

/// A region takes its time on every worker, and a job comes between two of its tiles.
TEST_F(CostedWorkersTest, ARegionAndJobsShareTheWorkers) {
  const std::function<void()> job = [] {};
  const Nanoseconds each = 1'000'010ns;  // of a job
  WorkGroup group(reactor_);
  group.spawn(workers_.compute("region", 3ms));
  for (int i = 0; i < 2; ++i) group.spawn(workers_.run(reactor_, {"job", 1'000'000}, job));
  reactor_.block_on(group.wait_idle());
  EXPECT_EQ(reactor_.clock().now(), 3ms + each);
  EXPECT_EQ(workers_.busy(), 2 * each) << "compute is no job";
  reactor_.block_on(workers_.compute("region", 500us));
  EXPECT_EQ(reactor_.clock().now(), 3ms + each + 500us);
}

TEST(AbsentMemory, KnowsWhichAddressesHaveMemory) {
  AbsentMemory absent(8 * kMiB);
  const std::span<std::byte> part = absent.reserve(3 * kMiB);
  const std::span<std::byte> other = absent.reserve(kMiB);
  std::byte outside{};
  EXPECT_TRUE(absent.lacks(part.data()) && absent.lacks(&part.back()));
  EXPECT_FALSE(absent.lacks(&outside));
  absent.make_real(part.subspan(kMiB, 100));
  EXPECT_FALSE(absent.lacks(&part[kMiB + 99]));
  EXPECT_TRUE(absent.lacks(&part[kMiB - 1]) && absent.lacks(&part[kMiB + 4096]));
  EXPECT_TRUE(absent.lacks(other.data()));
  EXPECT_EQ(part[kMiB], std::byte{0});
  EXPECT_THROW(absent.reserve(8 * kMiB), Error);
  EXPECT_DEATH(part[0] = std::byte{1}, "");
}

}  // namespace
}  // namespace ziggurat
