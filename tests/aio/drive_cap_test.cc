// SPDX-License-Identifier: Apache-2.0
// tests/aio/drive_cap_test.cc: the cap that is found is the drive's own: bandwidth times latency.
#include "aio/drive_cap.h"

#include <gtest/gtest.h>

#include "aio/simulated_engine.h"
#include "base/error.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace {

using namespace testing_support;

SimulatedEngineOptions with_latency(Nanoseconds latency) {
  SimulatedEngineOptions options;
  options.read_bytes_per_second = 2e9;
  options.latency = latency;
  options.jitter = 0;
  options.queue_depth = 64;
  return options;
}

struct Drive {
  explicit Drive(Nanoseconds latency) : engine(reactor, disk, with_latency(latency)) {
    OpenOptions options;
    options.create = true;
    options.writable = true;
    file = DirectFile::open(reactor, engine, "/data", options);
    file->allocate(16 * kMiB);
  }
  DriveCap find(IoKind kind) {
    return reactor.block_on(find_drive_cap(
        reactor, *file, memory.span(),
        {.kind = kind, .range_bytes = 16 * kMiB, .sample_bytes = 48 * kMiB, .rounds = 1}));
  }
  Reactor reactor{Clock::Kind::kVirtual};
  SimulatedDisk disk;
  SimulatedEngine engine;
  AlignedBuffer memory{32 * kMiB};
  std::unique_ptr<DirectFile> file;
};

TEST(DriveCapTest, ADriveWithoutDelayNeedsTwoBlocksSoThatOneIsAlwaysThere) {
  Drive drive(Nanoseconds(1000));
  const DriveCap cap = drive.find(IoKind::kRead);
  EXPECT_LE(cap.outstanding_bytes, 2 * kMiB);
  EXPECT_NEAR(cap.bytes_per_second, 2e9, 0.02 * 2e9);
  EXPECT_EQ(cap.samples.size(), 6u);
}

TEST(DriveCapTest, TheLongerTheDelayTheMoreMustBeAtTheDrive) {
  // A block takes 0.5 ms of the drive: 2.5 blocks' time of delay needs 3.5 blocks, 10 need 11.
  Drive near(std::chrono::microseconds(1250)), far(std::chrono::milliseconds(5));
  EXPECT_EQ(near.find(IoKind::kRead).outstanding_bytes, 4 * kMiB);
  const DriveCap cap = far.find(IoKind::kRead);
  EXPECT_EQ(cap.outstanding_bytes, 16 * kMiB);
  EXPECT_LT(cap.samples[3].bytes_per_second, 0.98 * cap.bytes_per_second);
}

TEST(DriveCapTest, WritesHaveACapOfTheirOwn) {
  Drive drive(std::chrono::milliseconds(1));
  EXPECT_GT(drive.find(IoKind::kWrite).outstanding_bytes,
            drive.find(IoKind::kRead).outstanding_bytes);
}

TEST(DriveCapTest, MemoryForNoBlockIsRefused) {
  Drive drive(Nanoseconds(1000));
  EXPECT_THROW(drive.reactor.block_on(find_drive_cap(drive.reactor, *drive.file,
                                                     drive.memory.part(0, kMiB - 4096),
                                                     {.range_bytes = kMiB, .sample_bytes = kMiB})),
               Error);
}

}  // namespace
}  // namespace ziggurat
