// SPDX-License-Identifier: Apache-2.0
// tiers/driver_watch.h: ends the process when a call into a device's driver does not come back.
//
// A thread inside a driver cannot be called off, and memory under its transfers cannot be taken
// away from it. Where a GPU has fallen off the bus such a call may never return: the process would
// hang for ever, and all ranks with it. So each call is watched, and past its deadline the process
// says which call it was and ends, without destructors, which would only wait for the same thread.
// Only time in which this process runs counts: it may be stopped itself (SIGSTOP, a scheduler that
// gives its turn to others), and then nothing of it could come back.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include "base/runtime/clock.h"

namespace ziggurat {

/// How long one call into the driver may take.
struct DriverDeadlines {
  /// Always. A wait for a transfer is such a call, and what it waits for may be queued behind
  /// minutes of the trainer's kernels.
  Nanoseconds call = std::chrono::hours(1);
  /// From the loss of the device on: the driver fails what is under way, it computes no more.
  Nanoseconds after_loss = std::chrono::seconds(30);
};

struct UnderWay;

/// Thread-safe.
class DriverWatch {
 public:
  /// `device` names it in the last message.
  DriverWatch(std::string device, DriverDeadlines deadlines);
  ~DriverWatch();

  /// A call under way, for as long as this lives.
  class Call {
   public:
    /// `function` is a literal; `size_bytes` what it moves or takes, 0 for none.
    Call(DriverWatch& watch, const char* function, std::uint64_t size_bytes);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    DriverWatch& watch_;
    std::list<UnderWay>::iterator entry_;
  };

  /// From now on the shorter deadline holds. `why` is told in the last message.
  void lost(const std::string& why);

 private:
  void watch();
  [[noreturn]] void end(const UnderWay& call, Nanoseconds took) const;

  const std::string device_;
  const DriverDeadlines deadlines_;
  std::mutex mutex_;  // all below
  std::condition_variable stop_;
  std::list<UnderWay> under_way_;
  std::string lost_why_;  // empty: the device is there
  Nanoseconds lost_at_{0};
  Nanoseconds stopped_{0};  // in which this process did not run, so far
  Nanoseconds stopped_before_loss_{0};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ziggurat
