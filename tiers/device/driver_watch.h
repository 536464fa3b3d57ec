// SPDX-License-Identifier: Apache-2.0
// tiers/device/driver_watch.h: ends the process when a call into a device's driver does not come
// back.
//
// A thread inside a driver cannot be stopped, and memory under its transfers cannot be taken away
// from it. If a GPU has fallen off the bus, such a call may never return: the process would hang
// for ever, and all ranks with it. So each call is watched. Past its deadline the process names the
// call and ends, without destructors, which would only wait for the same thread. Only time in which
// this process runs counts: it may itself be stopped (by SIGSTOP, or a scheduler that runs others),
// and then none of its calls could come back.
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
  /// The normal deadline. A wait for a transfer is such a call, and the transfer may be queued
  /// behind minutes of the trainer's kernels.
  Nanoseconds call = std::chrono::hours(1);
  /// The deadline after the loss of the device: the driver only fails what is under way, and
  /// computes nothing more.
  Nanoseconds after_loss = std::chrono::seconds(30);
};

struct UnderWay;

/// Watches the calls into one device's driver. Thread-safe.
class DriverWatch {
 public:
  /// `device` names the device in the last message.
  DriverWatch(std::string device, DriverDeadlines deadlines);
  ~DriverWatch();

  /// A call that is under way as long as this object lives.
  class Call {
   public:
    /// `function` is a literal; `size_bytes` is what the call moves or takes, 0 for none.
    Call(DriverWatch& watch, const char* function, std::uint64_t size_bytes);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    DriverWatch& watch_;
    std::list<UnderWay>::iterator entry_;
  };

  /// Switches to the shorter deadline. `why` is part of the last message.
  void lost(const std::string& why);

 private:
  void watch();
  [[noreturn]] void end(const UnderWay& call, Nanoseconds took) const;

  const std::string device_;
  const DriverDeadlines deadlines_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable stop_;
  std::list<UnderWay> under_way_;
  std::string lost_why_;  // empty while the device is not lost
  Nanoseconds lost_at_{0};
  Nanoseconds stopped_{0};  // time so far in which this process did not run
  Nanoseconds stopped_before_loss_{0};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ziggurat
