// SPDX-License-Identifier: Apache-2.0
// tests/aio/drive_queue_test.cc: in which order a drive is given what waits, how much of it at
// once, and that nothing waits for ever. In virtual time, so every order is exact.
#include "aio/drive_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cmath>
#include <deque>
#include <limits>

#include "aio/direct_file.h"
#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace drive_queue_test {

using namespace testing_support;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint32_t kBlock = 4096;
constexpr std::uint64_t kFileBytes = 64 * kMiB;

/// A queue over a drive that finishes in the order in which it is given, and what has come back.
class DriveQueueTest : public ::testing::Test {
 protected:
  struct Op {
    IoOp op;
    std::string name;
    DriveQueueTest* test;
    std::int32_t result = -1'000'000;
    std::function<void()> then;
  };

  void make(DriveQueueOptions options) {
    SimulatedEngineOptions exact;
    exact.jitter = 0;
    exact.queue_depth = 64;
    auto drive = std::make_unique<FaultyEngine>(
        reactor, std::make_unique<SimulatedEngine>(reactor, disk, exact));
    faults = drive.get();
    queue = std::make_unique<DriveQueue>(reactor, std::move(drive), options);
    OpenOptions open;
    open.create = true;
    open.writable = true;
    file = queue->open("/data", open);
    queue->allocate(file, kFileBytes);
  }

  Op& submit(const std::string& name, IoKind kind, IoPriority priority, std::uint32_t blocks = 1) {
    Op& mine = ops.emplace_back();
    mine.name = name;
    mine.test = this;
    const auto memory_part = memory.part(0, std::size_t{blocks} * kBlock);
    mine.op = kind == IoKind::kSync   ? sync_op(file)
              : kind == IoKind::kRead ? read_op(file, 0, memory_part)
                                      : write_op(file, 0, memory_part);
    mine.op.priority = priority;
    mine.op.user = &mine;
    mine.op.complete = [](IoOp& op, std::int32_t result) {
      Op& done = *static_cast<Op*>(op.user);
      done.result = result;
      done.test->order.push_back(done.name);
      done.test->completed_bytes += op.size_bytes;
      if (done.then) done.then();
    };
    queue->submit(mine.op);
    return mine;
  }
  Op& read(const std::string& name, IoPriority priority, std::uint32_t blocks = 1) {
    return submit(name, IoKind::kRead, priority, blocks);
  }
  Op& write(const std::string& name, IoPriority priority, std::uint32_t blocks = 1) {
    return submit(name, IoKind::kWrite, priority, blocks);
  }
  /// Runs `action` on the reactor, and everything that follows from it.
  void run(std::function<void()> action) {
    reactor.post(std::move(action));
    reactor.run_until_idle();
  }

  Reactor reactor{Clock::Kind::kVirtual};
  SimulatedDisk disk;
  AlignedBuffer memory{4 * kMiB};
  std::deque<Op> ops;  // outlive the queue
  std::vector<std::string> order;
  std::uint64_t completed_bytes = 0;
  FaultyEngine* faults = nullptr;
  std::unique_ptr<DriveQueue> queue;
  FileHandle file;
};

constexpr DriveQueueOptions kOneBlock{.outstanding_bytes_max = kBlock, .overtaken_bytes_max = kGiB};
constexpr auto kDemand = IoPriority::kDemand;
constexpr auto kPrefetch = IoPriority::kPrefetch;
constexpr auto kWriteBack = IoPriority::kWriteBack;
constexpr auto kDurable = IoPriority::kDurable;

TEST_F(DriveQueueTest, WhatSomeoneWaitsForOvertakesPrefetchAndPrefetchWriteBack) {
  make(kOneBlock);
  run([&] {
    write("first", kWriteBack);
    write("durable", kDurable);
    write("back 1", kWriteBack);
    read("prefetch 1", kPrefetch);
    write("back 2", kWriteBack);
    read("demand 1", kDemand);
    read("prefetch 2", kPrefetch);
    read("demand 2", kDemand);
  });
  EXPECT_THAT(order, ElementsAre("first", "demand 1", "demand 2", "prefetch 1", "prefetch 2",
                                 "back 1", "back 2", "durable"));
}

TEST_F(DriveQueueTest, ASyncWaitsForNobody) {
  make(kOneBlock);
  run([&] {
    for (int i = 0; i < 5; ++i) write("back", kWriteBack);
    submit("sync", IoKind::kSync, kDemand);
    EXPECT_EQ(faults->calls(FaultPoint::kSync), 1u);
  });
  EXPECT_EQ(order.size(), 6u);
}

TEST_F(DriveQueueTest, WaitingTransfersMayBeRaised) {
  make(kOneBlock);
  AlignedBuffer wanted(2 * kBlock);
  run([&] {
    write("first", kWriteBack);
    write("back", kWriteBack);
    read("prefetch", kPrefetch);
    read("demand", kDemand);
    for (const char* name : {"wanted 1", "wanted 2"}) {
      // Submitted again with memory of its own: submit() gives all the same.
      Op& op = ops.emplace_back();
      op = ops[0];
      op.name = name;
      op.op.user = &op;
      op.op.data = wanted.part(name[7] == '1' ? 0 : kBlock, kBlock).data();
      queue->submit(op.op);
    }
    queue->raise(wanted.span(), kDemand);
    queue->raise(wanted.span(), kPrefetch);  // never lowers
  });
  EXPECT_THAT(order, ElementsAre("first", "demand", "wanted 1", "wanted 2", "prefetch", "back"));
}

TEST_F(DriveQueueTest, TheDriveIsNeverGivenMoreThanTheCap) {
  constexpr std::uint64_t kCap = 10 * kBlock;
  make({.outstanding_bytes_max = kCap, .overtaken_bytes_max = 20 * kBlock});
  std::uint64_t peak = 0;
  const auto look = [&] {
    EXPECT_LE(queue->outstanding_bytes(), kCap);
    peak = std::max(peak, queue->outstanding_bytes());
  };
  run([&] {
    for (std::uint32_t i = 0; i < 300; ++i) {
      const auto priority = static_cast<IoPriority>(i % kIoPriorities);
      submit("any", i % 2 == 0 ? IoKind::kRead : IoKind::kWrite, priority, 1 + i % 7).then = look;
      look();
    }
  });
  EXPECT_EQ(order.size(), 300u);
  EXPECT_EQ(peak, kCap) << "the cap is used";
  EXPECT_EQ(queue->outstanding_bytes(), 0u);
}

TEST_F(DriveQueueTest, ATransferLargerThanTheCapGoesAloneAndIsNotPassedBySmallOnes) {
  make({.outstanding_bytes_max = 4 * kBlock, .overtaken_bytes_max = kGiB});
  run([&] {
    read("small 1", kDemand, 3);
    read("large", kDemand, 9).then = [&] { EXPECT_EQ(queue->outstanding_bytes(), 0u); };
    read("small 2", kDemand);
  });
  EXPECT_THAT(order, ElementsAre("small 1", "large", "small 2"));
}

TEST_F(DriveQueueTest, ReadsAndWritesOfOnePriorityShareTheDriveByBytes) {
  make({.outstanding_bytes_max = 8 * kBlock, .overtaken_bytes_max = kGiB});
  std::int64_t lead = 0, worst = 0;
  constexpr std::uint32_t kReadBlocks = 1, kWriteBlocks = 8;
  run([&] {
    // As many bytes each: 8 times the operations.
    for (int i = 0; i < 800; ++i) {
      read("read", kDemand, kReadBlocks).then = [&] {
        worst = std::max(worst, std::abs(lead += kReadBlocks));
      };
    }
    for (int i = 0; i < 100; ++i) {
      write("write", kDemand, kWriteBlocks).then = [&] {
        worst = std::max(worst, std::abs(lead -= kWriteBlocks));
      };
    }
  });
  EXPECT_EQ(lead, 0);
  // One operation of the larger size, and what was given before the first write came.
  EXPECT_LE(worst, 2 * kWriteBlocks);
}

TEST_F(DriveQueueTest, NoPriorityIsShutOut) {
  constexpr std::uint64_t kOvertaken = 50;
  make({.outstanding_bytes_max = kBlock, .overtaken_bytes_max = kOvertaken * kBlock});
  int demands = 0;
  std::vector<int> demands_before_back, demands_before_prefetch;
  // Demand never ends: each asks for the next.
  std::function<void()> ask = [&] {
    if (++demands < 1000) read("demand", kDemand).then = ask;
  };
  run([&] {
    read("demand", kDemand).then = ask;
    read("demand", kDemand).then = ask;
    for (int i = 0; i < 5; ++i) {
      write("back", kWriteBack).then = [&] { demands_before_back.push_back(demands); };
      read("prefetch", kPrefetch).then = [&] { demands_before_prefetch.push_back(demands); };
    }
  });
  for (const auto& turns : {demands_before_back, demands_before_prefetch}) {
    ASSERT_EQ(turns.size(), 5u);
    for (std::size_t i = 0; i < turns.size(); ++i) {
      EXPECT_LE(turns[i], static_cast<int>((i + 1) * (kOvertaken + 2)));
      EXPECT_GE(turns[i], static_cast<int>((i + 1) * (kOvertaken - 2))) << "nor favoured";
    }
  }
}

TEST_F(DriveQueueTest, FaultsOfTheDrivePassThrough) {
  make(kOneBlock);
  faults->plan(Fault::fail(FaultPoint::kRead, EIO).at(1));
  faults->plan(Fault::shorten(FaultPoint::kRead, 1000).at(2));
  faults->plan(Fault::zero(FaultPoint::kWrite).at(0));
  faults->plan(Fault::fail(FaultPoint::kSync, EIO).at(0));
  run([&] {
    for (int i = 0; i < 3; ++i) read("read", kDemand);
    write("write", kDemand);
    submit("sync", IoKind::kSync, kDemand);
  });
  std::vector<std::int32_t> results;
  for (const Op& op : ops) results.push_back(op.result);
  EXPECT_THAT(results, ElementsAre(4096, -EIO, 3096, 0, -EIO));
}

TEST_F(DriveQueueTest, ItsEndCancelsWhatWaitsAndLeavesTheRestToTheEngineInside) {
  make({.outstanding_bytes_max = 4 * kBlock, .overtaken_bytes_max = kGiB});
  // A drive that hangs, and cancels when it goes.
  faults->plan(Fault::slow(FaultPoint::kRead, std::chrono::hours(1)).from_then_on());
  run([&] {
    for (int i = 0; i < 20; ++i) read("op", static_cast<IoPriority>(i % kIoPriorities));
    EXPECT_EQ(queue->in_flight(), 20u);
    EXPECT_EQ(faults->in_flight(), 4u);
    queue.reset();
  });
  EXPECT_EQ(order.size(), 20u);
  for (const Op& op : ops) EXPECT_EQ(op.result, -ECANCELED);
}

TEST_F(DriveQueueTest, AFileSaysHowSoonItsTransfersAreNeeded) {
  make({.outstanding_bytes_max = DirectFile::kBlockBytes, .overtaken_bytes_max = kGiB});
  OpenOptions open;
  open.writable = true;
  const auto direct = DirectFile::open(reactor, *queue, "/data", open);
  const auto finish = [&](std::string name, Task<> task) -> Task<> {
    co_await std::move(task);
    order.push_back(name);
  };
  constexpr std::size_t kRequest = DirectFile::kBlockBytes;
  AlignedBuffer back(4 * kRequest), ahead(2 * kRequest), wanted(2 * kRequest);
  WorkGroup group(reactor);
  run([&] {
    group.spawn(finish("back", direct->write(0, back.span(), kWriteBack)));
    group.spawn(finish("ahead", direct->read(0, ahead.span(), kPrefetch)));
    group.spawn(finish("wanted", direct->read(0, wanted.span(), kPrefetch)));
    reactor.post([&] { queue->raise(wanted.span(), kDemand); });
  });
  EXPECT_FALSE(group.failed());
  EXPECT_THAT(order, ElementsAre("wanted", "ahead", "back"));
}

TEST_F(DriveQueueTest, SaysWhatItIs) {
  make({.outstanding_bytes_max = 8 * kMiB, .overtaken_bytes_max = kGiB});
  EXPECT_THAT(queue->description(), HasSubstr("at most 8.0 MiB at the drive"));
}

}  // namespace drive_queue_test
}  // namespace ziggurat
