// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_signals_test.cc: a run that is told something, by one process of it or by
// all: it makes a checkpoint, or ends in order, with its state durable before anything that may
// take long. And it runs without a terminal, and without standard streams.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_signals_test {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

/// A file of /proc/PID: what could be read of it before the process ended.
std::stringstream process_file(pid_t pid, const std::string& name) {
  std::stringstream text;
  text << std::ifstream(fs::path("/proc") / std::to_string(pid) / name).rdbuf();
  return text;
}

/// The value of a line of /proc/PID/status, a mask of signals.
std::uint64_t signals_of(pid_t pid, const std::string& line) {
  std::stringstream status = process_file(pid, "status");
  for (std::string word; status >> word;) {
    if (word != line + ":") continue;
    status >> word;
    return std::stoull(word, nullptr, 16);
  }
  return 0;
}

/// Its main() has begun: it handles SIGUSR1, or keeps it for later.
bool takes_signals(pid_t pid) {
  return ((signals_of(pid, "SigCgt") | signals_of(pid, "SigBlk")) >> (SIGUSR1 - 1) & 1) != 0;
}

/// The launcher, and its ranks.
std::vector<pid_t> processes(pid_t launcher) {
  std::stringstream children =
      process_file(launcher, "task/" + std::to_string(launcher) + "/children");
  std::vector<pid_t> all{launcher};
  for (pid_t child = 0; children >> child;) all.push_back(child);
  return all;
}

/// While it lives, this process has `signal` as `how`, and so do those that it starts.
class Inherited {
 public:
  Inherited(int signal, sighandler_t how) : signal_(signal), before_(::signal(signal, how)) {}
  ~Inherited() { ::signal(signal_, before_); }

 private:
  int signal_;
  sighandler_t before_;
};

class CliSignals : public ::testing::Test {
 protected:
  Arguments train(int steps, int ranks = 1) const {
    return tiny_train(folder_, "store", steps) +
           Arguments{"--nproc", std::to_string(ranks), "--checkpoint-dir", checkpoints()};
  }
  /// State is durable when the run ends, and in 300 s.
  Arguments train_in_memory(int steps, int ranks) const {
    return train(steps, ranks) + Arguments{"--placement", "optimizer=host"};
  }
  std::string checkpoints() const { return folder_ / "checkpoints"; }
  std::size_t checkpoint_count() const {
    std::size_t count = 0;
    for (const auto& entry : fs::directory_iterator(checkpoints()))
      count += entry.path().filename().string().starts_with("step-") ? 1 : 0;
    return count;
  }

  /// The next run begins anew.
  void forget() const {
    fs::remove_all(folder_ / "store");
    fs::remove_all(checkpoints());
  }

  /// It ended in order: the last step is durable, and its checkpoint whole.
  void expect_ended_in_order(const Output& output, int ranks) {
    EXPECT_EQ(output.exit_code, 130) << output.out << output.err;
    EXPECT_THAT(output.err, Not(HasSubstr("aborted")));
    EXPECT_THAT(output.out, HasSubstr("interrupted: generation"));
    const auto bits = loss_bits(output.out);
    ASSERT_FALSE(bits.empty());
    const int last = bits.rbegin()->first;
    const Output verified = ziggurat(folder_.path(), {"ckpt", "verify", checkpoints()});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
    EXPECT_THAT(verified.out, HasSubstr(std::to_string(last)));
    const Output rest = ziggurat(folder_.path(), train_in_memory(last + 1, ranks));
    EXPECT_EQ(rest.exit_code, 0) << rest.err;
    EXPECT_EQ(loss_bits(rest.out).begin()->first, last + 1);
    forget();
  }

  TemporaryFolder folder_;
};

TEST_F(CliSignals, AskTheLauncherForOneCheckpointOfAllRanks) {
  Process run(folder_.path(), train(100'000, 2));
  ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
  run.signal(SIGUSR1);
  ASSERT_TRUE(run.wait_for_output("a rank in")) << run.err();
  run.signal(SIGTERM);
  const Output output = run.wait();
  EXPECT_EQ(output.exit_code, 130) << output.err;
  EXPECT_EQ(ziggurat(folder_.path(), {"ckpt", "verify", checkpoints()}).exit_code, 0);
  EXPECT_EQ(checkpoint_count(), 2U);  // the one that was asked for, and that of the end
}

TEST_F(CliSignals, ThatEveryProcessOfARunGetsEndItInOrder) {
  for (const bool launcher_first : {true, false}) {
    for (const auto gap : {0ms, 2ms, 20ms}) {
      SCOPED_TRACE(::testing::Message() << launcher_first << ", " << gap.count() << " ms");
      Process run(folder_.path(), train_in_memory(100'000, 2));
      ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
      std::vector<pid_t> all = processes(run.pid());
      ASSERT_EQ(all.size(), 3U);
      if (!launcher_first) std::reverse(all.begin(), all.end());
      for (const pid_t pid : all) {
        ::kill(pid, SIGTERM);
        std::this_thread::sleep_for(gap);
      }
      expect_ended_in_order(run.wait(), 2);
    }
  }
}

// `timeout` tells its child, and then all of its group.
TEST_F(CliSignals, ThatComeTwiceInAMomentAreOne) {
  Process run(folder_.path(), train_in_memory(100'000, 1));
  ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
  run.signal(SIGTERM);
  std::this_thread::sleep_for(5ms);
  run.signal(SIGINT);
  expect_ended_in_order(run.wait(), 1);
}

// The checkpoint would take minutes: the grace of a scheduler is over before.
TEST_F(CliSignals, MakeStateDurableBeforeItIsSavedAndASecondOneLaterAborts) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    Process run(folder_.path(),
                train_in_memory(100'000, ranks) + Arguments{"--checkpoint-bandwidth", "2kB"});
    ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
    run.signal(SIGTERM);
    ASSERT_TRUE(run.wait_for_output("interrupted: generation")) << run.out() << run.err();
    std::this_thread::sleep_for(1200ms);
    EXPECT_FALSE(run.ended()) << run.out();
    run.signal(SIGTERM);
    const Output output = run.wait();
    EXPECT_EQ(output.exit_code, 130) << output.out << output.err;
    EXPECT_THAT(output.err, HasSubstr("aborted"));
    const int last = loss_bits(output.out).rbegin()->first;
    const Output rest = ziggurat(folder_.path(), train_in_memory(last + 1, ranks));
    EXPECT_THAT(rest.out, HasSubstr("resumed at step " + std::to_string(last)));
    forget();
  }
}

TEST_F(CliSignals, OfATerminalThatIsClosedEndARunInOrder) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    Process run(folder_.path(), train_in_memory(100'000, ranks));
    ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
    run.signal(SIGHUP);
    expect_ended_in_order(run.wait(), ranks);
  }
}

TEST_F(CliSignals, OfATerminalThatIsClosedAreIgnoredWhereTheyWereAtTheStart) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const Inherited nohup(SIGHUP, SIG_IGN);
    Process run(folder_.path(), train(12, ranks));
    ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
    for (const pid_t pid : processes(run.pid())) ::kill(pid, SIGHUP);
    const Output output = run.wait();
    EXPECT_EQ(output.exit_code, 0) << output.err;
    forget();
  }
}

TEST_F(CliSignals, ThatAskForACheckpointNeverEndAProcessOfARun) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    Process run(folder_.path(), train(4, ranks));
    while (!run.ended()) {
      for (const pid_t pid : processes(run.pid())) {
        if (takes_signals(pid)) ::kill(pid, SIGUSR1);
      }
      std::this_thread::sleep_for(500us);
    }
    const Output output = run.wait();
    EXPECT_EQ(output.exit_code, 0) << "signal " << output.signal << output.out << output.err;
    EXPECT_EQ(ziggurat(folder_.path(), {"ckpt", "verify", checkpoints()}).exit_code, 0);
    forget();
  }
}

// As the launcher has them arrive.
TEST_F(CliSignals, ThatComeBeforeMainAreKept) {
  sigset_t wish;
  sigset_t before;
  ::sigemptyset(&wish);
  ::sigaddset(&wish, SIGUSR1);
  ::sigprocmask(SIG_BLOCK, &wish, &before);
  Process run(folder_.path(), train(100'000));
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  run.signal(SIGUSR1);
  EXPECT_TRUE(run.wait_for_output("a rank in")) << run.out() << run.err();
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait().exit_code, 130);
}

/// `ziggurat arguments...` in a child that `prepare` has changed. Its exit code; 128 and the signal
/// where one ended it. `meanwhile` is called until it ends.
int run_after(
    const std::function<void()>& prepare, const Arguments& arguments,
    const std::function<void(pid_t)>& meanwhile = [](pid_t) {}) {
  std::vector<std::string> words{ZIGGURAT_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    prepare();
    ::execv(ZIGGURAT_BINARY, argv.data());
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    meanwhile(child);
    std::this_thread::sleep_for(1ms);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void to_file(int fd, const std::string& path) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ::dup2(file, fd);
}

TEST_F(CliSignals, AndStandardStreamsMayBeMissing) {
  for (const std::vector<int>& closed :
       {std::vector<int>{0}, std::vector<int>{1}, std::vector<int>{2}, std::vector<int>{0, 1, 2}}) {
    SCOPED_TRACE(::testing::PrintToString(closed));
    bool looked = false;
    const int code = run_after(
        [&] {
          to_file(STDOUT_FILENO, folder_ / "out");
          to_file(STDERR_FILENO, folder_ / "err");
          for (const int fd : closed) ::close(fd);
        },
        train(3),
        [&](pid_t pid) {
          if (looked || !fs::exists(folder_ / "store")) return;
          std::error_code gone;
          for (const int fd : closed) {
            const fs::path link =
                fs::path("/proc") / std::to_string(pid) / "fd" / std::to_string(fd);
            const fs::path opened = fs::read_symlink(link, gone);
            if (gone) return;
            EXPECT_EQ(opened, "/dev/null") << fd;
          }
          looked = true;
        });
    EXPECT_EQ(code, 0);
    EXPECT_TRUE(looked);
    const Output verified = ziggurat(folder_.path(), {"ckpt", "verify", folder_ / "store"});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
    forget();
  }
}

// `| head`, or a terminal that is gone: what is shown is a report, and ends no run.
TEST_F(CliSignals, AndNobodyMayReadWhatARunSays) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    ::close(ends[0]);
    const int code = run_after(
        [&] {
          ::dup2(ends[1], STDOUT_FILENO);
          to_file(STDERR_FILENO, folder_ / "err");
        },
        train(6, ranks));
    ::close(ends[1]);
    EXPECT_EQ(code, 1);  // all is done, and not all was said
    EXPECT_THAT(contents(folder_ / "err"), HasSubstr("standard output: EPIPE"));
    const Output rest = ziggurat(folder_.path(), train(7, ranks));
    EXPECT_THAT(rest.out, HasSubstr("resumed at step 6 of 7")) << rest.err;
    forget();
  }
}

}  // namespace cli_signals_test
}  // namespace ziggurat::test
