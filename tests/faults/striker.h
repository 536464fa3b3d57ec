// SPDX-License-Identifier: Apache-2.0
// tests/faults/striker.h: drives of a process that dies at one of their calls.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "core/engine/runtime.h"

namespace ziggurat::testing {

/// The drives of a process that kills itself before one of the calls that change something, counted
/// from 0 over all of its drives and ranks.
class Striker {
 public:
  explicit Striker(std::uint64_t call) : call_(call) {}
  void take(Runtime& runtime) {
    runtime.io_engine = [this](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      faulty->set_gate([this](FaultPoint point) {
        if (changes(point) && calls_++ == call_) ::kill(::getpid(), SIGKILL);
        return 0;
      });
      return faulty;
    };
  }

 private:
  static bool changes(FaultPoint point) {
    return point != FaultPoint::kRead && point != FaultPoint::kExists &&
           point != FaultPoint::kFileSize && point != FaultPoint::kAlignment &&
           point != FaultPoint::kNamesIn;
  }
  const std::uint64_t call_;
  std::atomic<std::uint64_t> calls_ = 0;
};

/// Does `work` in a process of its own, which ends where it returns. Returns false if the process
/// was killed by SIGKILL; any other end is a failure of the test.
inline bool survives(const std::function<void()>& work) {
  constexpr int kDone = 7;
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      work();
    } catch (const std::exception& error) {
      ::fprintf(stderr, "in the child: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(kDone);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  EXPECT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == kDone)) << status;
  return !killed;
}

}  // namespace ziggurat::testing
