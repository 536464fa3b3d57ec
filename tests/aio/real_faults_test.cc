// SPDX-License-Identifier: Apache-2.0
// tests/aio/real_faults_test.cc: faults that nobody injects: a full disk, a drive that is gone, a
// limit of the process, a file cut short by somebody else. What the kernel makes of them reaches
// the caller, on every real engine.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/ioctl.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <optional>
#include <thread>

#include "aio/direct_file.h"
#include "base/checksum.h"
#include "base/error.h"
#include "tests/aio/engine_cases.h"
#include "tests/aio/io_testing.h"
#include "tests/support/loop_filesystem.h"

namespace ziggurat {
namespace {

using namespace testing_support;
using test::LoopFilesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr std::size_t kSize = 8 * kMiB;

class RealFaults : public ::testing::TestWithParam<EngineCase> {
 protected:
  std::unique_ptr<DirectFile> create(const std::string& path) {
    OpenOptions options;
    options.create = true;
    options.writable = true;
    return DirectFile::open(reactor, *engine, path, options);
  }
  std::optional<Error> failure(Task<> task) {
    try {
      reactor.block_on(std::move(task));
      return std::nullopt;
    } catch (const Error& error) {
      return error;
    }
  }
  static void expect_transfer_error(const std::optional<Error>& error, const std::string& what,
                                    const std::string& path, int error_number) {
    ASSERT_TRUE(error) << what << " of " << path << " was reported as success";
    EXPECT_EQ(error->native(), error_number) << error->what();
    EXPECT_THAT(error->what(),
                AllOf(HasSubstr(path), HasSubstr(errno_text(error_number)), ContainsRegex(what)));
  }

  Reactor reactor;
  MakeEngine make = GetParam().make_world();
  std::unique_ptr<IoEngine> engine = make(reactor);
};

TEST_P(RealFaults, AFullDisk) {
  const LoopFilesystem disk(24 * kMiB);
  if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
  disk.fill_up_to(3 * kMiB);
  const std::string path = disk / "data";
  const auto file = create(path);
  AlignedBuffer out(kSize), in(kMiB);
  fill(out.span(), 1);
  // Without space reserved: some blocks fit, one comes back short, the rest have no room.
  expect_transfer_error(failure(file->write(0, out.span())),
                        "cannot write [0-9]+ bytes at offset [0-9]+", path, ENOSPC);
  // Reserved first, which is how we make our files, it is said before anything is written.
  try {
    file->allocate(kSize);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(path), HasSubstr("free"), HasSubstr("ENOSPC")));
  }
  // What had found room is whole, and the drive is usable again when there is room.
  std::filesystem::remove(disk.path() / "filler");
  reactor.block_on(file->write(0, out.span()));
  reactor.block_on(file->sync());
  reactor.block_on(file->read(7 * kMiB, in.span()));
  EXPECT_TRUE(same(in.span(), out.part(7 * kMiB, kMiB)));
}

// As when a drive is pulled, or an array gives up: every transfer fails from now on.
TEST_P(RealFaults, ADriveThatIsGone) {
  const LoopFilesystem disk(24 * kMiB);
  if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
  const std::string path = disk / "data";
  const auto file = create(path);
  AlignedBuffer memory(2 * kMiB);
  reactor.block_on(file->write(0, memory.span()));
  reactor.block_on(file->sync());

  constexpr unsigned long kShutdown = _IOR('X', 125, std::uint32_t);  // FS_IOC_SHUTDOWN
  std::uint32_t without_flush = 2;
  const int root = ::open(disk.path().c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(root, 0);
  const int result = ::ioctl(root, kShutdown, &without_flush);
  const int error = errno;
  ::close(root);
  if (result != 0) GTEST_SKIP() << "FS_IOC_SHUTDOWN: " << errno_text(error);

  expect_transfer_error(failure(file->write(0, memory.span())),
                        "cannot write 2097152 bytes at offset", path, EIO);
  expect_transfer_error(failure(file->read(0, memory.span())),
                        "cannot read 2097152 bytes at offset", path, EIO);
  expect_transfer_error(failure(file->sync()), "cannot sync", path, EIO);
}

// In a process of its own, where SIGXFSZ does what it does by default: kill.
TEST_P(RealFaults, AFileSizeLimitIsAnErrorAndNotTheEndOfTheProcess) {
  // A mere fork of a process with threads may find an allocator's lock held for ever.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const TemporaryDirectory directory;
  const auto child = [&] {
    std::signal(SIGXFSZ, SIG_DFL);
    const rlimit limit{3 * kMiB, 3 * kMiB};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) std::_Exit(3);
    Reactor mine;
    const auto limited = make(mine);
    OpenOptions options;
    options.create = true;
    options.writable = true;
    const auto file = DirectFile::open(mine, *limited, directory.file("data"), options);
    AlignedBuffer out(kSize);
    try {
      file->allocate(kSize);
      std::_Exit(4);
    } catch (const Error& error) {
      fmt::print(stderr, "allocate: {} {}\n", to_string(error.code()), error.what());
    }
    try {
      mine.block_on(file->write(0, out.span()));
      std::_Exit(5);
    } catch (const Error& error) {
      fmt::print(stderr, "write: {} {}\n", to_string(error.code()), error.what());
    }
    mine.block_on(file->write(0, out.part(0, kMiB)));  // within the limit all is well
    std::_Exit(0);
  };
  EXPECT_EXIT(
      child(), ::testing::ExitedWithCode(0),
      "allocate: resource exhausted .*data: cannot make a file of 8.0 MiB: EFBIG.*"
      "at most 3.0 MiB; "
      "raise RLIMIT_FSIZE(.|\n)*"
      "write: resource exhausted cannot write [0-9]+ bytes at offset [0-9]+ of .*data: EFBIG");
}

TEST_P(RealFaults, AFileCutShortUnderneathAReader) {
  const TemporaryDirectory directory;
  const auto file = create(directory.file("data"));
  AlignedBuffer out(kSize), in(kSize);
  fill(out.span(), 2);
  int ended_early = 0;
  for (int round = 0; round < 12; ++round) {
    reactor.block_on(file->write(0, out.span()));
    const auto length = static_cast<off_t>((1 + round % 7) * kMiB + 512 * (round % 3));
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * (round % 6)));
      EXPECT_EQ(::truncate(file->path().c_str(), length), 0);
    });
    const auto error = failure(file->read(0, in.span()));
    other.join();
    if (!error) {
      EXPECT_TRUE(same(in.span(), out.span())) << "round " << round;
      continue;
    }
    ++ended_early;
    EXPECT_EQ(error->code(), ErrorCode::kDataLoss) << error->what();
    EXPECT_THAT(error->what(), AllOf(HasSubstr(file->path()),
                                     ContainsRegex("cannot read [0-9]+ bytes at offset [0-9]+"),
                                     HasSubstr(fmt::format("the file ends at {}", length))));
  }
  const auto after = failure(file->read(0, in.span()));  // and surely now
  ASSERT_TRUE(after);
  EXPECT_EQ(after->code(), ErrorCode::kDataLoss);
  RecordProperty("ended_early", ended_early);
}

// A write past the end makes the file long again, with a hole: no error tells. The hash does, which
// is why no state of ours is without one.
TEST_P(RealFaults, AFileCutShortUnderneathAWriterIsToldByTheHash) {
  const TemporaryDirectory directory;
  const auto file = create(directory.file("data"));
  AlignedBuffer out(kSize), in(kSize);
  fill(out.span(), 3);
  const std::uint64_t hash = hash64(out.span(), 0);
  reactor.block_on(file->write(0, out.part(0, kSize / 2)));
  ASSERT_EQ(::truncate(file->path().c_str(), kMiB), 0);
  reactor.block_on(file->write(kSize / 2, out.part(kSize / 2, kSize / 2)));
  reactor.block_on(file->sync());
  reactor.block_on(file->read(0, in.span()));
  EXPECT_NE(hash64(in.span(), 0), hash);
  // Nothing but the hole is wrong.
  std::copy_n(out.span().begin() + kMiB, kSize / 2 - kMiB, in.span().begin() + kMiB);
  EXPECT_EQ(hash64(in.span(), 0), hash);
}

std::vector<EngineCase> real_cases() {
  std::vector<EngineCase> all = engine_cases();
  std::erase_if(all, [](const EngineCase& each) {
    return !each.on_disk || each.name.starts_with("faulty") || each.name.starts_with("queued");
  });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Engines, RealFaults, ::testing::ValuesIn(real_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ziggurat
