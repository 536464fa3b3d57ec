// SPDX-License-Identifier: Apache-2.0
// tests/aio/lock_holder_test.cc: who holds a file's lock, and how long an engine waits for one that
// has ended.
#include "aio/lock_holder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "aio/io_engine.h"
#include "aio/posix_files.h"
#include "aio/thread_engine.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace {

using namespace testing_support;

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

TEST_F(LockHolderTest, AnEngineWaitsLongerForOneThatHasEnded) {
  locked_by_one_that_ended();
  if (!lock_holder(fd.get())) GTEST_SKIP() << "/proc/locks does not name this filesystem's files";
  Reactor reactor;
  ThreadEngine engine(reactor);
  std::jthread writes_end([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    fd = UniqueFd();
  });
  OpenOptions options;
  options.writable = true;
  options.lock = true;
  options.lock_wait = std::chrono::milliseconds(10);
  engine.close(engine.open(path, options));
}

}  // namespace
}  // namespace ziggurat
