// SPDX-License-Identifier: Apache-2.0
// tests/aio/direct_file_test.cc: whole transfers arrive or fail with path, offset, length and
// errno; no fault of any kind at any point is reported as success.
#include "aio/direct_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <optional>
#include <sstream>

#include "aio/faulty_engine.h"
#include "base/error.h"
#include "tests/aio/engine_cases.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace {

using namespace testing_support;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Four requests, the last one smaller.
constexpr std::size_t kSize = 3 * std::size_t{DirectFile::kBlockBytes} + 5 * 4096;
constexpr std::uint64_t kOffset = 3 * 4096;

constexpr auto kName = [](const auto& test) { return test.param.name; };

std::vector<EngineCase> plain_cases() {
  std::vector<EngineCase> all = engine_cases();
  std::erase_if(all, [](const EngineCase& each) { return each.name.starts_with("faulty"); });
  return all;
}

std::vector<EngineCase> plain_cases_on_disk() {
  std::vector<EngineCase> all = plain_cases();
  std::erase_if(all, [](const EngineCase& each) { return !each.on_disk; });
  return all;
}

class DirectFileTest : public ::testing::TestWithParam<EngineCase> {
 protected:
  std::unique_ptr<DirectFile> create(const std::string& name) {
    OpenOptions options;
    options.create = true;
    options.writable = true;
    return DirectFile::open(reactor, engine, directory.file(name), options, {.metrics = &metrics});
  }

  /// Runs `task`; the Error it ended with, if it did.
  std::optional<Error> failure(Task<> task) {
    try {
      reactor.block_on(std::move(task));
      return std::nullopt;
    } catch (const Error& error) {
      return error;
    }
  }

  TemporaryDirectory directory;
  Reactor reactor{GetParam().clock};
  MakeEngine make = GetParam().make_world();  // holds the world
  FaultyEngine engine{reactor, make(reactor)};
  Metrics metrics;
};

TEST_P(DirectFileTest, TransfersOfAnyAlignedSizeComeBack) {
  const auto file = create("data");
  const std::size_t grain =
      std::max(file->alignment().offset_bytes, file->alignment().memory_bytes);
  AlignedBuffer out(kSize), in(kSize);
  fill(out.span(), 1);
  std::uint64_t offset = 0;
  for (const std::size_t size : {std::size_t{0}, grain, 7 * grain, std::size_t{1} << 20,
                                 (std::size_t{1} << 20) + grain, kSize / grain * grain}) {
    reactor.block_on(file->write(offset, out.part(0, size)));
    reactor.block_on(file->read(offset, in.part(0, size)));
    EXPECT_TRUE(same(in.part(0, size), out.part(0, size))) << size;
    offset += size;
  }
  reactor.block_on(file->sync());
  EXPECT_EQ(file->size_bytes(), offset);
  EXPECT_EQ(metrics.value(Counter::kNvmeReadBytes), offset);
  EXPECT_EQ(metrics.value(Counter::kNvmeWriteBytes), offset);
  EXPECT_GT(metrics.value(Counter::kNvmeBusyNs), 0u);
}

TEST_P(DirectFileTest, AMisalignedTransferNamesTheAlignment) {
  const auto file = create("data");
  AlignedBuffer memory(2 * kSize);
  const std::uint32_t offset_bytes = file->alignment().offset_bytes;
  const std::string multiples = "multiples of " + std::to_string(offset_bytes) + " bytes";
  const auto expect_refused = [&](const std::optional<Error>& error) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), AllOf(HasSubstr(multiples), HasSubstr(file->path())));
  };
  for (const auto& [offset, begin, size] :
       {std::array<std::size_t, 3>{1, 0, 4096}, {0, 0, 4095}, {0, 1, 4096}}) {
    expect_refused(failure(file->write(offset, memory.part(begin, size))));
    expect_refused(failure(file->read(offset, memory.part(begin, size))));
  }
  EXPECT_EQ(engine.calls(FaultPoint::kRead) + engine.calls(FaultPoint::kWrite), 0u);
}

TEST_P(DirectFileTest, AFailureWaitsForTheBlocksThatAreStillInFlight) {
  const auto file = create("data");
  AlignedBuffer memory(kSize);
  reactor.block_on(file->write(0, memory.span()));
  engine.plan(Fault::fail(FaultPoint::kRead, EIO).at(0));
  for (int call = 1; call < 4; ++call)
    engine.plan(Fault::slow(FaultPoint::kRead, std::chrono::milliseconds(5)).at(call));
  const auto error = failure(file->read(0, memory.span()));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->native(), EIO);
  EXPECT_EQ(engine.injected(FaultPoint::kRead), 4u);
  EXPECT_EQ(engine.in_flight(), 0u);
}

TEST_P(DirectFileTest, TheFirstFailureIsTheOneReported) {
  const auto file = create("data");
  AlignedBuffer memory(kSize);
  engine.plan(Fault::fail(FaultPoint::kWrite, ENOSPC).at(2));
  engine.plan(Fault::slow(FaultPoint::kWrite, std::chrono::milliseconds(1)).at(0));
  const auto error = failure(file->write(kOffset, memory.span()));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error->what(), HasSubstr("cannot write 4194304 bytes at offset " +
                                       std::to_string(kOffset + 2 * DirectFile::kBlockBytes) +
                                       " of " + file->path() + ": ENOSPC"));
}

TEST_P(DirectFileTest, AMisdirectedWriteIsNotSeenHereButByWhoeverChecksTheBytes) {
  const auto file = create("data");
  AlignedBuffer out(4096), in(4096);
  fill(out.span(), 3);
  reactor.block_on(file->write(0, in.span()));
  engine.plan(Fault::misdirect(4096).at(1));
  reactor.block_on(file->write(0, out.span()));
  reactor.block_on(file->read(0, in.span()));
  EXPECT_FALSE(same(in.span(), out.span()));
  reactor.block_on(file->read(4096, in.span()));
  EXPECT_TRUE(same(in.span(), out.span()));
  EXPECT_EQ(engine.injected(FaultPoint::kWrite), 1u);
}

TEST_P(DirectFileTest, NameLevelFaultsReachTheCaller) {
  const auto file = create("data");
  engine.plan(Fault::fail(FaultPoint::kOpen, EACCES).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kAllocate, ENOSPC).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kFileSize, EIO).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kAlignment, EIO).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kRename, EXDEV).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kRemove, EBUSY).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kExists, EIO).from_then_on());
  engine.plan(Fault::fail(FaultPoint::kSyncDirectory, EIO).from_then_on());
  EXPECT_THROW(create("other"), Error);
  EXPECT_THROW(file->allocate(kMiB), Error);
  EXPECT_THROW(file->size_bytes(), Error);
  EXPECT_THROW(engine.alignment({}), Error);
  EXPECT_THROW(engine.rename(file->path(), directory.file("other")), Error);
  EXPECT_THROW(engine.remove(file->path()), Error);
  EXPECT_THROW(engine.exists(file->path()), Error);
  EXPECT_THROW(engine.sync_directory(directory.path()), Error);
}

struct FaultCase {
  std::string name;
  Fault (*make)(FaultPoint);
  int native;        // the errno that an error carries; 0: it has none
  bool passes_once;  // a transfer survives one of it
  bool fits_sync;
};

const std::vector<FaultCase> kFaults = {
    {"EIO", [](FaultPoint p) { return Fault::fail(p, EIO); }, EIO, false, true},
    {"ENOSPC", [](FaultPoint p) { return Fault::fail(p, ENOSPC); }, ENOSPC, false, true},
    {"ECANCELED", [](FaultPoint p) { return Fault::fail(p, ECANCELED); }, ECANCELED, false, true},
    {"EAGAIN", [](FaultPoint p) { return Fault::fail(p, EAGAIN); }, EAGAIN, true, true},
    {"EINTR", [](FaultPoint p) { return Fault::fail(p, EINTR); }, EINTR, true, true},
    {"short by a page", [](FaultPoint p) { return Fault::shorten(p, 4096); }, 0, true, false},
    {"short by 1000", [](FaultPoint p) { return Fault::shorten(p, 1000); }, 0, true, false},
    {"short by all but 512 bytes of the last block",
     [](FaultPoint p) { return Fault::shorten(p, 5 * 4096 - 512); }, 0, true, false},
    {"zero", [](FaultPoint p) { return Fault::zero(p); }, 0, false, false},
};

class DirectFileFaults : public DirectFileTest {
 protected:
  /// One transfer or sync with `fault` planned; checks what must hold whether it passed or not.
  void attempt(DirectFile& file, FaultPoint point, const FaultCase& fault, bool persistent) {
    AlignedBuffer memory(kSize);
    if (point == FaultPoint::kWrite) fill(memory.span(), ++seed_);
    std::optional<Error> error;
    if (point == FaultPoint::kRead) error = failure(file.read(kOffset, memory.span()));
    if (point == FaultPoint::kWrite) error = failure(file.write(kOffset, memory.span()));
    if (point == FaultPoint::kSync) error = failure(file.sync());
    EXPECT_EQ(engine.in_flight(), 0u);
    const bool struck = engine.injected(point) > injected_before_;
    const bool may_pass =
        !struck || (!persistent && fault.passes_once && point != FaultPoint::kSync);
    ASSERT_EQ(error.has_value(), !may_pass) << (error ? error->what() : "reported as success");
    engine.clear_plan();
    if (error) {
      check(*error, file, point, fault, persistent);
    } else if (point == FaultPoint::kRead) {
      EXPECT_TRUE(same(memory.span(), contents_.span()));
    } else if (point == FaultPoint::kWrite) {
      AlignedBuffer in(kSize);
      reactor.block_on(file.read(kOffset, in.span()));
      EXPECT_TRUE(same(in.span(), memory.span()));
    }
  }

  void check(const Error& error, const DirectFile& file, FaultPoint point, const FaultCase& fault,
             bool persistent) {
    EXPECT_THAT(error.what(), HasSubstr(file.path()));
    if (point == FaultPoint::kSync) {
      EXPECT_THAT(error.what(), HasSubstr("fdatasync"));
    } else {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr(" bytes at offset "),
                        HasSubstr(point == FaultPoint::kRead ? "cannot read" : "cannot write")));
    }
    EXPECT_EQ(error.native(), fault.native);
    if (fault.native != 0) {
      EXPECT_THAT(error.what(), HasSubstr(errno_text(fault.native)));
    } else {
      EXPECT_EQ(error.code(),
                point == FaultPoint::kRead ? ErrorCode::kDataLoss : ErrorCode::kUnavailable);
    }
    if (persistent && fault.passes_once && fault.native != 0 && point != FaultPoint::kSync) {
      EXPECT_GT(engine.injected(point) - injected_before_,
                static_cast<std::uint64_t>(DirectFile::kRetriesMax));
    }
  }

  AlignedBuffer contents_{kSize};
  std::uint64_t injected_before_ = 0;
  std::uint64_t seed_ = 100;
};

TEST_P(DirectFileFaults, NoFaultAtAnyPositionIsReportedAsSuccess) {
  const auto file = create("data");
  fill(contents_.span(), 99);
  reactor.block_on(file->write(kOffset, contents_.span()));
  int struck = 0;
  for (const FaultPoint point : {FaultPoint::kRead, FaultPoint::kWrite, FaultPoint::kSync}) {
    for (const FaultCase& fault : kFaults) {
      if (point == FaultPoint::kSync && !fault.fits_sync) continue;
      for (const bool persistent : {false, true}) {
        for (std::uint64_t position = 0;; ++position) {
          SCOPED_TRACE(fault.name + (persistent ? " from call " : " at call ") +
                       std::to_string(position) + " of point " +
                       std::to_string(static_cast<int>(point)));
          ASSERT_LT(position, 100u) << "no clean pass";
          injected_before_ = engine.injected(point);
          const Fault planned = fault.make(point).at(engine.calls(point) + position);
          engine.plan(persistent ? planned.from_then_on() : planned);
          attempt(*file, point, fault, persistent);
          if (HasFatalFailure()) return;
          if (engine.injected(point) == injected_before_) break;
          ++struck;
        }
      }
    }
  }
  EXPECT_GT(struck, 100);
}

INSTANTIATE_TEST_SUITE_P(Engines, DirectFileTest, ::testing::ValuesIn(plain_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Engines, DirectFileFaults, ::testing::ValuesIn(plain_cases()), kName);

class DirectFileOnDisk : public DirectFileTest {};

TEST_P(DirectFileOnDisk, AFileSizeLimitIsAnErrorWithItsErrno) {
  const auto file = create("data");
  AlignedBuffer memory(kSize);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{(3 << 19), old_limit.rlim_max};  // in the middle of the second block
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto error = failure(file->write(0, memory.span()));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->native(), EFBIG);
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error->what(), HasSubstr(file->path()));
}

TEST_P(DirectFileOnDisk, AFileCutShortUnderneathIsDataLoss) {
  const auto file = create("data");
  AlignedBuffer memory(kSize);
  reactor.block_on(file->write(0, memory.span()));
  for (const off_t length : {off_t{3 << 19}, off_t{(3 << 19) + 100}, off_t{0}}) {
    ASSERT_EQ(::truncate(file->path().c_str(), length), 0);
    const auto error = failure(file->read(0, memory.span()));
    ASSERT_TRUE(error) << length;
    EXPECT_EQ(error->code(), ErrorCode::kDataLoss);
    EXPECT_THAT(error->what(), AllOf(HasSubstr("the file ends at " + std::to_string(length)),
                                     HasSubstr(file->path())));
  }
}

TEST_P(DirectFileOnDisk, TheEndOfAFileNeedNotBeAligned) {
  const auto file = create("data");
  AlignedBuffer memory(4096);
  reactor.block_on(file->write(0, memory.span()));
  ASSERT_EQ(::truncate(file->path().c_str(), 1000), 0);
  const auto error = failure(file->read(0, memory.span()));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kDataLoss);
  EXPECT_THAT(error->what(), HasSubstr("the file ends at 1000"));
}

TEST_P(DirectFileOnDisk, AFilesystemThatStatesNoAlignmentWorks) {
  struct statfs filesystem {};
  constexpr long kTmpfsMagic = 0x01021994;
  if (::statfs("/dev/shm", &filesystem) != 0 || filesystem.f_type != kTmpfsMagic)
    GTEST_SKIP() << "/dev/shm is no tmpfs here";
  const TemporaryDirectory shm("/dev/shm");
  OpenOptions options;
  options.create = true;
  options.writable = true;
  const auto file = DirectFile::open(reactor, engine, shm.file("data"), options);
  EXPECT_EQ(file->alignment().offset_bytes, 4096u);
  AlignedBuffer out(kSize), in(kSize);
  fill(out.span(), 5);
  reactor.block_on(file->write(0, out.span()));
  reactor.block_on(file->read(0, in.span()));
  EXPECT_TRUE(same(in.span(), out.span()));
}

TEST_P(DirectFileOnDisk, ABufferedFileNeedsNoAlignment) {
  OpenOptions options;
  options.create = true;
  options.writable = true;
  options.direct = false;
  const auto file = DirectFile::open(reactor, engine, directory.file("data"), options);
  AlignedBuffer out(5000), in(5000);
  fill(out.span(), 6);
  reactor.block_on(file->write(13, out.part(1, 4321)));
  reactor.block_on(file->read(13, in.part(1, 4321)));
  EXPECT_TRUE(same(in.part(1, 4321), out.part(1, 4321)));
}

INSTANTIATE_TEST_SUITE_P(Engines, DirectFileOnDisk, ::testing::ValuesIn(plain_cases_on_disk()),
                         kName);

TEST(IoActivityTest, TimeIsBusyFromTheFirstTransferInToTheLastOut) {
  Metrics metrics;
  IoActivity activity;
  const auto read = activity.begin(IoKind::kRead, Nanoseconds{100}, nullptr);
  const auto second = activity.begin(IoKind::kRead, Nanoseconds{150}, nullptr);
  activity.end(read, Nanoseconds{200}, &metrics, nullptr);
  const auto write = activity.begin(IoKind::kWrite, Nanoseconds{250}, nullptr);
  activity.end(second, Nanoseconds{300}, &metrics, nullptr);
  const auto sync = activity.begin(IoKind::kSync, Nanoseconds{350}, nullptr);
  activity.end(write, Nanoseconds{400}, &metrics, nullptr);
  activity.end(sync, Nanoseconds{900}, &metrics, nullptr);
  EXPECT_EQ(metrics.value(Counter::kNvmeReadBusyNs), 200u);
  EXPECT_EQ(metrics.value(Counter::kNvmeWriteBusyNs), 150u);
  EXPECT_EQ(metrics.value(Counter::kNvmeBusyNs), 300u);
}

TEST(IoActivityTest, OverlappingTransfersAreDrawnOnLanesOfTheirOwn) {
  const TemporaryDirectory directory;
  {
    const auto trace = Trace::open(directory.file("trace.json"));
    IoActivity activity;
    const auto first = activity.begin(IoKind::kRead, {}, trace.get());
    const auto second = activity.begin(IoKind::kRead, {}, trace.get());
    EXPECT_NE(first.lane, second.lane);
    activity.end(first, {}, nullptr, trace.get());
    const auto third = activity.begin(IoKind::kRead, {}, trace.get());
    EXPECT_EQ(third.lane, first.lane);
    const auto write = activity.begin(IoKind::kWrite, {}, trace.get());
    for (const auto& seat : {second, third, write}) activity.end(seat, {}, nullptr, trace.get());
  }
  std::ostringstream text;
  text << std::ifstream(directory.file("trace.json")).rdbuf();
  EXPECT_THAT(text.str(), AllOf(HasSubstr("\"nvme read\""), HasSubstr("\"nvme read 2\""),
                                HasSubstr("\"nvme write\"")));
  EXPECT_EQ(text.str().find("nvme read 3"), std::string::npos);
}

}  // namespace
}  // namespace ziggurat
