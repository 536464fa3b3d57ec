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
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "aio/direct_file.h"
#include "base/error.h"
#include "base/log.h"
#include "tests/aio/io_testing.h"
#include "tests/support/child_process.h"

namespace ziggurat {
namespace {

using namespace testing_support;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr std::size_t kSize = 5 * kMiB + 4096;
constexpr std::uint64_t kSeed = 42;

// As container runtimes do: the call exists, and is not permitted.
bool forbid(std::uint32_t call) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
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

class ProbeForbiddenTest : public ProbeTest {
 protected:
  /// Ends the process: 0 if, with `calls` forbidden, `expected` is chosen, said once, and writes.
  [[noreturn]] void write_without(std::vector<std::uint32_t> calls, const std::string& expected,
                                  std::size_t notes) const {
    for (const std::uint32_t call : calls) {
      if (!forbid(call)) std::_Exit(3);
    }
    Reactor reactor;
    IoProbe probe;
    const auto engine = choose_io_engine(reactor, directory.path(), &probe);
    if (probe.engine != expected) std::_Exit(4);
    if (probe.notes.size() != notes || degraded_modes().size() != 1) std::_Exit(5);
    write_file(reactor, *engine, directory.file("data"));
    std::_Exit(0);
  }
  void expect_same_bytes() const {
    Reactor reactor;
    const auto engine = choose_io_engine(reactor, directory.path());
    expect_written(reactor, *engine, directory.file("data"));
  }
};

#ifdef ZIGGURAT_HAVE_URING
#define NO_URING                                                                \
  "io_uring: io_uring_setup: (EPERM \\(Operation not permitted\\)|ENOSYS .*); " \
  ".*seccomp filter.*"
#else
#define NO_URING "io_uring: this build does not include this engine.*"
#endif

#ifdef ZIGGURAT_HAVE_LIBAIO
TEST_F(ProbeForbiddenTest, WhereIoUringIsForbiddenLibaioWritesTheSameBytesAndItIsSaid) {
  EXPECT_EXIT(write_without({__NR_io_uring_setup}, "libaio", 1), ::testing::ExitedWithCode(0),
              "using libaio, since " NO_URING);
  expect_same_bytes();
}
#define NO_LIBAIO "libaio: libaio: io_setup: EPERM \\(Operation not permitted\\)"
#else
#define NO_LIBAIO "libaio: this build does not include this engine"
#endif

TEST_F(ProbeForbiddenTest, WhereLibaioIsForbiddenTooThreadsDo) {
  EXPECT_EXIT(write_without({__NR_io_uring_setup, __NR_io_setup}, "threads", 2),
              ::testing::ExitedWithCode(0), "using threads, since " NO_URING NO_LIBAIO);
  expect_same_bytes();
}

TEST_F(ProbeTest, TheEnvironmentForcesAnEngine) {
  std::vector<std::string> names = {"threads"};
#ifdef ZIGGURAT_HAVE_LIBAIO
  names.push_back("libaio");
#endif
  for (const std::string& name : names) {
    ::setenv("ZIGGURAT_IO", name.c_str(), 1);
    Reactor reactor;
    IoProbe probe;
    const std::size_t degraded_before = degraded_modes().size();
    const auto engine = choose_io_engine(reactor, directory.path(), &probe);
    EXPECT_EQ(probe.engine, name);
    EXPECT_THAT(probe.notes, Contains(HasSubstr("ZIGGURAT_IO=" + name)));
    EXPECT_EQ(degraded_modes().size(), degraded_before) << "asked for is not degraded";
  }
}

TEST_F(ProbeTest, ANonsenseEngineIsRefusedByName) {
  ::setenv("ZIGGURAT_IO", "floppy", 1);
  Reactor reactor;
  try {
    choose_io_engine(reactor, directory.path());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("ZIGGURAT_IO=floppy"), HasSubstr("io_uring, libaio or threads")));
  }
}

TEST_F(ProbeTest, WhereNothingWorksEachReasonIsGiven) {
  Reactor reactor;
  try {
    choose_io_engine(reactor, directory.file("missing"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr(directory.file("missing")), HasSubstr("io_uring: "),
                      HasSubstr("libaio: "), HasSubstr("threads: "), HasSubstr("ENOENT")));
  }
}

/// Another user's directory, as one finds a checkpoint there.
class ProbeReadingTest : public ProbeTest {
 protected:
  ProbeReadingTest() {
    Reactor reactor;
    const auto engine = choose_io_engine(reactor, directory.path());
    std::filesystem::create_directory(directory.file("step"));
    write_file(reactor, *engine, directory.file("step/data"));
    std::ofstream(directory.file("latest")) << "step\n";
    for (const char* name : {"", "step"}) reading_is_allowed(directory.file(name));
    for (const char* name : {"step/data", "latest"})
      std::filesystem::permissions(directory.file(name), std::filesystem::perms(0444));
    // That of the tests themselves may be closed to others: it is theirs meanwhile.
    std::filesystem::current_path(directory.path());
  }
  ~ProbeReadingTest() override {
    std::filesystem::current_path(before_);
    for (const char* name : {"", "step"})
      std::filesystem::permissions(directory.file(name), std::filesystem::perms(0755));
  }
  static void reading_is_allowed(const std::string& path) {
    std::filesystem::permissions(path, std::filesystem::perms(0555));
  }
  /// What `body` says as a user who owns nothing here.
  static std::string as_another(const std::function<std::string()>& body) {
    return in_child_process([&]() -> std::string {
      if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return "no setuid";
      return body();
    });
  }

  const std::filesystem::path before_ = std::filesystem::current_path();
};

TEST_F(ProbeReadingTest, AnEngineIsFoundThatReadsWhatIsThere) {
  EXPECT_EQ(as_another([] {
              Reactor reactor;
              IoProbe probe;
              const auto engine = choose_io_engine(reactor, ".", &probe);
              if (::access(".", W_OK) == 0) return std::string("it may write there");
              AlignedBuffer expected(kSize), in(kSize);
              fill(expected.span(), kSeed);
              const auto file = DirectFile::open(reactor, *engine, "step/data", {});
              reactor.block_on(file->read(0, in.span()));
              return std::string(same(in.span(), expected.span()) ? "the same" : "other bytes");
            }),
            "the same");
}

TEST_F(ProbeReadingTest, WhoWritesIsToldByTheFileThatHeMakes) {
  EXPECT_THAT(as_another([] {
                Reactor reactor;
                const auto engine = choose_io_engine(reactor, ".");
                write_file(reactor, *engine, "./new");
                return std::string("written");
              }),
              AllOf(HasSubstr("open ./new"), HasSubstr("EACCES")));
}

}  // namespace
}  // namespace ziggurat
