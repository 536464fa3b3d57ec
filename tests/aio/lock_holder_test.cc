// SPDX-License-Identifier: Apache-2.0
// tests/aio/lock_holder_test.cc: who holds a file's lock, and how long an engine waits for one that
// has ended.
#include "aio/lock_holder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aio/file_lock.h"
#include "aio/io_engine.h"
#include "aio/posix_files.h"
#include "aio/thread_engine.h"
#include "base/error.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace lock_holder_test {

using namespace testing_support;

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

bool is_zombie(pid_t pid) {
  std::string line;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), line);
  return line.find(") Z ") != std::string::npos;
}

/// How often this process has a file open.
std::ptrdiff_t count_open(const std::string& path) {
  std::ptrdiff_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code failure;  // one may be closed meanwhile
    if (std::filesystem::read_symlink(entry.path(), failure) == path) ++count;
  }
  return count;
}

class LockHolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fd = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT, 0600));
    ASSERT_TRUE(fd);
  }
  /// Lets a child take the lock of `fd`, which this process then has from it, and end.
  pid_t locked_by_one_that_ended() const {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 ? 0 : 1);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    return child;
  }

  TemporaryDirectory directory;
  std::string path = directory.file("data");
  UniqueFd fd;
};

TEST_F(LockHolderTest, NobodyHoldsAFileThatIsNotLocked) {
  EXPECT_FALSE(lock_holder(fd.get()).has_value());
}

TEST_F(LockHolderTest, TellsTheProcessAndItsName) {
  ASSERT_EQ(::flock(fd.get(), LOCK_EX), 0);
  const std::optional<LockHolder> holder = lock_holder(fd.get());
  if (!holder) GTEST_SKIP() << "/proc/locks does not name this filesystem's files";
  std::string name;
  std::getline(std::ifstream("/proc/self/comm"), name);
  EXPECT_EQ(holder->pid, ::getpid());
  EXPECT_EQ(holder->name, name);
  EXPECT_FALSE(holder->ended);
}

TEST_F(LockHolderTest, TellsThatTheProcessHasEnded) {
  const pid_t child = locked_by_one_that_ended();
  const std::optional<LockHolder> holder = lock_holder(fd.get());
  if (!holder) GTEST_SKIP() << "/proc/locks does not name this filesystem's files";
  EXPECT_EQ(holder->pid, child);
  EXPECT_TRUE(holder->ended);
}

// Whoever waits for it alone would take its lock for that of one that has ended.
TEST_F(LockHolderTest, TellsThatAProcessGoesOnWithoutItsMainThread) {
  std::array<int, 2> locked{};
  ASSERT_EQ(::pipe(locked.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([&] {
      while (!is_zombie(::getpid())) std::this_thread::yield();
      const char done = ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 ? 'y' : 'n';
      if (::write(locked[1], &done, 1) != 1) ::_exit(1);
      ::pause();
    }).detach();
    ::syscall(SYS_exit, 0);  // of this thread alone
  }
  ::close(locked[1]);
  char done = 0;
  ASSERT_EQ(::read(locked[0], &done, 1), 1);
  EXPECT_EQ(done, 'y');
  const std::optional<LockHolder> holder = lock_holder(fd.get());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(locked[0]);
  if (!holder) GTEST_SKIP() << "/proc/locks does not name this filesystem's files";
  EXPECT_EQ(holder->pid, child);
  EXPECT_FALSE(holder->ended);
}

/// A lock that somebody holds, as the test says, and how it is waited for.
class FileLock : public LockHolderTest {
 protected:
  void SetUp() override {
    LockHolderTest::SetUp();
    ASSERT_EQ(::flock(fd.get(), LOCK_EX), 0);
    second = UniqueFd(::open(path.c_str(), O_RDWR));
    ASSERT_TRUE(second);
  }
  void lock(milliseconds wait, const FindHolder& find) const {
    lock_file({.fd = second.get(), .path = path, .wait = wait, .begin = steady_clock::now()}, find);
  }
  std::string refusal(milliseconds wait, const FindHolder& find) const {
    try {
      lock(wait, find);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_EQ(error.native(), EWOULDBLOCK);
      return error.what();
    }
    return "locked";
  }
  /// Answers with these holders one after the other, and then with the last one.
  static FindHolder answers(std::vector<std::optional<LockHolder>> all) {
    return [all = std::move(all), next = std::size_t{0}](int) mutable {
      return all[std::min(next++, all.size() - 1)];
    };
  }

  UniqueFd second;
};

/// The line of a thread that is named like a shell's, in `state`, with `flags` and `pending`
/// signals.
std::string stat_of(char state, unsigned flags, unsigned pending) {
  const std::string limit = "18446744073709551615";  // of the resident set, which is field 25
  return "7 (a) (sh) " + std::string(1, state) + " 1 7 7 0 -1 " + std::to_string(flags) +
         " 10 0 11 0 12 13 14 15 16 17 18 0 20 21 22 " + limit + " 24 25 26 27 28 " +
         std::to_string(pending) + " 30 31 32";
}

TEST(ThreadEnded, IsToldByItsStateItsFlagsAndASignalThatKillsIt) {
  constexpr unsigned kUsual = 0x400040;
  EXPECT_FALSE(thread_ended(stat_of('D', kUsual, 0)));
  EXPECT_FALSE(thread_ended(stat_of('S', kUsual, 1U << (SIGTERM - 1))));
  EXPECT_TRUE(thread_ended(stat_of('Z', kUsual, 0)));
  EXPECT_TRUE(thread_ended(stat_of('R', kUsual | 0x4, 0)));
  EXPECT_TRUE(thread_ended(stat_of('D', kUsual, 1U << (SIGKILL - 1)))) << "it waits for a drive";
  EXPECT_FALSE(thread_ended(""));
}

// Its last writes done, the kernel forgets who it was before the lock is free for others.
TEST_F(FileLock, IsWaitedForUntilTheEndedHolderOfBeforeIsGone) {
  const LockHolder ended{.pid = 2, .name = "killed", .ended = true};
  std::atomic<bool> gone = false;
  std::jthread frees([&] {
    while (!gone) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(50));
    ::flock(fd.get(), LOCK_UN);
  });
  bool asked = false;
  lock(milliseconds(10), [&](int) -> std::optional<LockHolder> {
    gone = std::exchange(asked, true);
    if (gone) return std::nullopt;
    return ended;
  });
}

TEST_F(FileLock, ThatComesFreeWhileItsHolderIsLookedForIsTaken) {
  lock(milliseconds(0), [&](int) -> std::optional<LockHolder> {
    ::flock(fd.get(), LOCK_UN);
    return std::nullopt;
  });
}

TEST_F(FileLock, IsNotWaitedForWhereNobodyWaits) {
  const LockHolder ended{.pid = 2, .name = "killed", .ended = true};
  EXPECT_THAT(refusal(milliseconds(0), answers({ended})),
              HasSubstr("in use by another process, 2, which has ended: its last writes, or a "
                        "process that inherited the lock, hold it"));
}

TEST_F(FileLock, IsInUseByTheProcessThatHasIt) {
  EXPECT_THAT(refusal(milliseconds(20), answers({std::nullopt})),
              HasSubstr("in use by another process (this process waited"));
  EXPECT_THAT(
      refusal(milliseconds(20), answers({LockHolder{2, "python3", false}})),
      AllOf(HasSubstr("another process, 2 (python3) (this"), HasSubstr("stop that process")));
  EXPECT_THAT(refusal(milliseconds(20), answers({LockHolder{2, "", false}})),
              HasSubstr("another process, 2 (this"));
}

// Its close may have to wait until this call has ended.
TEST_F(FileLock, OfThisProcessIsWaitedForLessLong) {
  EXPECT_THAT(
      refusal(std::chrono::hours(1), answers({LockHolder{::getpid(), "", false}})),
      AllOf(HasSubstr("by this process itself"), HasSubstr("close the engine that has it")));
}

TEST_F(LockHolderTest, AnEngineWaitsLongerForOneThatHasEnded) {
  locked_by_one_that_ended();
  if (!lock_holder(fd.get())) GTEST_SKIP() << "/proc/locks does not name this filesystem's files";
  Reactor reactor;
  ThreadEngine engine(reactor);
  std::jthread writes_end([this] {
    std::this_thread::sleep_for(milliseconds(200));
    fd = UniqueFd();
  });
  OpenOptions options;
  options.writable = true;
  options.lock = true;
  options.lock_wait = milliseconds(10);
  engine.close(engine.open(path, options));
}

// A child that another thread forks meanwhile must not keep the lock when its parent is killed.
TEST_F(FileLock, ThatIsWaitedForIsNotKeptByAChild) {
  std::array<int, 2> says{};
  ASSERT_EQ(::pipe(says.data()), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    fd = UniqueFd();  // shared with the test, which keeps the lock
    Reactor reactor;
    ThreadEngine engine(reactor);
    std::jthread opens([&] {
      engine.open(path, {.writable = true, .lock = true});
      const pid_t done = 0;
      if (::write(says[1], &done, sizeof(done)) < 0) ::_exit(1);
      ::pause();
    });
    while (count_open(path) < 2) std::this_thread::yield();  // `second`, and the engine's
    std::this_thread::sleep_for(milliseconds(20));
    if (::fork() == 0) {
      second = UniqueFd();
      const pid_t child = ::getpid();  // said by itself: a fork returns before its child has run
      if (::write(says[1], &child, sizeof(child)) < 0) ::_exit(1);
    }
    for (;;) ::pause();
  }
  ::close(says[1]);
  pid_t child = 0;
  ASSERT_EQ(::read(says[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  ::flock(fd.get(), LOCK_UN);
  pid_t locked = -1;
  ASSERT_EQ(::read(says[0], &locked, sizeof(locked)), static_cast<ssize_t>(sizeof(locked)));
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  EXPECT_EQ(::flock(fd.get(), LOCK_EX | LOCK_NB), 0) << "the child holds the lock";
  ::kill(child, SIGKILL);
  ::close(says[0]);
}

}  // namespace lock_holder_test
}  // namespace ziggurat
