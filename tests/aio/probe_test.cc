// SPDX-License-Identifier: Apache-2.0
// tests/aio/probe_test.cc: the engine that works is found, what does not is named, and the bytes
// are the same.
#include "aio/probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

#include "aio/direct_file.h"
#include "base/error.h"
#include "base/log.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace {

using namespace testing_support;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr std::size_t kSize = 5 * kMiB + 4096;
constexpr std::uint64_t kSeed = 42;

// As container runtimes do: the call exists, and is not permitted.
bool forbid_io_uring() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

Task<> write_all(DirectFile& file) {
  AlignedBuffer out(kSize);
  fill(out.span(), kSeed);
  co_await file.write(0, out.span());
  co_await file.sync();
}

void write_file(Reactor& reactor, IoEngine& engine, const std::string& path) {
  OpenOptions options;
  options.create = true;
  options.writable = true;
  const auto file = DirectFile::open(reactor, engine, path, options);
  reactor.block_on(write_all(*file));
}

void expect_written(Reactor& reactor, IoEngine& engine, const std::string& path) {
  const auto file = DirectFile::open(reactor, engine, path, {});
  AlignedBuffer expected(kSize), in(kSize);
  fill(expected.span(), kSeed);
  reactor.block_on(file->read(0, in.span()));
  EXPECT_TRUE(same(in.span(), expected.span()));
}

class ProbeTest : public ::testing::Test {
 protected:
  ProbeTest() { ::unsetenv("ZIGGURAT_IO"); }
  ~ProbeTest() override { ::unsetenv("ZIGGURAT_IO"); }
  TemporaryDirectory directory;
};

TEST_F(ProbeTest, TheChosenEngineWorksOnTheReactorsThread) {
  Reactor reactor;
  IoProbe probe;
  const auto engine = choose_io_engine(reactor, directory.path(), &probe);
  EXPECT_THAT(engine->description(), HasSubstr(probe.engine));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  reactor.start();  // another thread than the one that probed
  write_file(reactor, *engine, directory.file("data"));
  expect_written(reactor, *engine, directory.file("data"));
  reactor.stop();
}

TEST_F(ProbeTest, WhereIoUringIsForbiddenThreadsWriteTheSameBytesAndItIsSaid) {
  const auto child = [&] {
    if (!forbid_io_uring()) std::_Exit(3);
    Reactor reactor;
    IoProbe probe;
    const auto engine = choose_io_engine(reactor, directory.path(), &probe);
    if (probe.engine != "threads" || probe.notes.size() != 1 || degraded_modes().size() != 1)
      std::_Exit(4);
    write_file(reactor, *engine, directory.file("data"));
    std::_Exit(0);
  };
#ifdef ZIGGURAT_HAVE_URING
  constexpr const char* kSaid =
      "using threads, since io_uring: io_uring_setup: EPERM \\(Operation not permitted\\); "
      ".*seccomp filter";
#else
  constexpr const char* kSaid = "using threads, since io_uring: not built in";
#endif
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), kSaid);
  Reactor reactor;
  const auto engine = choose_io_engine(reactor, directory.path());
  expect_written(reactor, *engine, directory.file("data"));
}

TEST_F(ProbeTest, TheEnvironmentForcesAnEngine) {
  ::setenv("ZIGGURAT_IO", "threads", 1);
  Reactor reactor;
  IoProbe probe;
  const std::size_t degraded_before = degraded_modes().size();
  const auto engine = choose_io_engine(reactor, directory.path(), &probe);
  EXPECT_EQ(probe.engine, "threads");
  EXPECT_THAT(probe.notes, Contains(HasSubstr("ZIGGURAT_IO=threads")));
  EXPECT_EQ(degraded_modes().size(), degraded_before) << "asked for is not degraded";
}

TEST_F(ProbeTest, ANonsenseEngineIsRefusedByName) {
  ::setenv("ZIGGURAT_IO", "floppy", 1);
  Reactor reactor;
  try {
    choose_io_engine(reactor, directory.path());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("ZIGGURAT_IO=floppy"), HasSubstr("threads")));
  }
}

TEST_F(ProbeTest, WhereNothingWorksEachReasonIsGiven) {
  Reactor reactor;
  try {
    choose_io_engine(reactor, directory.file("missing"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(directory.file("missing")), HasSubstr("io_uring: "),
                                    HasSubstr("threads: "), HasSubstr("ENOENT")));
  }
}

}  // namespace
}  // namespace ziggurat
