// SPDX-License-Identifier: Apache-2.0
// tiers/device/driver_watch.cc: a list of the calls under way, and a thread that looks at it from
// time to time.
#include "tiers/device/driver_watch.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/bytes.h"

namespace ziggurat {

struct UnderWay {
  const char* function;
  std::uint64_t size_bytes;
  Nanoseconds since;
  Nanoseconds stopped_before;
};

DriverWatch::DriverWatch(std::string device, DriverDeadlines deadlines)
    : device_(std::move(device)), deadlines_(deadlines) {
  thread_ = std::thread([this] { watch(); });
}

DriverWatch::~DriverWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_one();
  thread_.join();
}

DriverWatch::Call::Call(DriverWatch& watch, const char* function, std::uint64_t size_bytes)
    : watch_(watch) {
  const std::lock_guard lock(watch_.mutex_);
  const UnderWay call{.function = function,
                      .size_bytes = size_bytes,
                      .since = monotonic_now(),
                      .stopped_before = watch_.stopped_};
  entry_ = watch_.under_way_.insert(watch_.under_way_.end(), call);
}

DriverWatch::Call::~Call() {
  const std::lock_guard lock(watch_.mutex_);
  watch_.under_way_.erase(entry_);
}

void DriverWatch::lost(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!lost_why_.empty()) return;
  lost_why_ = why;
  lost_at_ = monotonic_now();
  stopped_before_loss_ = stopped_;
}

void DriverWatch::watch() {
  ::pthread_setname_np(::pthread_self(), "zig-gpu-watch");
  // A quarter of the deadline, so that a call exceeds its deadline by at most that.
  const Nanoseconds pause = std::min(deadlines_.call, deadlines_.after_loss) / 4;
  std::unique_lock lock(mutex_);
  Nanoseconds last = monotonic_now();
  while (!stop_.wait_for(lock, pause, [this] { return stopping_; })) {
    const Nanoseconds now = monotonic_now();
    // If this look is late, this process did not run, and calls into the driver did not run either.
    if (now - last > 2 * pause) stopped_ += now - last - pause;
    last = now;
    for (const UnderWay& call : under_way_) {
      const Nanoseconds took = now - call.since - (stopped_ - call.stopped_before);
      const bool late_after_loss =
          !lost_why_.empty() && std::min(took, now - lost_at_ - (stopped_ - stopped_before_loss_)) >
                                    deadlines_.after_loss;
      if (took > deadlines_.call || late_after_loss) end(call, took);
    }
  }
}

void DriverWatch::end(const UnderWay& call, Nanoseconds took) const {
  const std::string bytes =
      call.size_bytes == 0 ? "" : fmt::format(" of {}", format_bytes(call.size_bytes));
  const std::string why = lost_why_.empty() ? "" : fmt::format(" ({})", lost_why_);
  // Not through the log, because a thread that is stuck may hold its lock.
  fmt::print(stderr,
             "ziggurat: {}: {}{} has not come back from the driver for {:.1f} s{}, so this process "
             "ends now. Everything on the drives is kept. Look for Xid lines in the kernel's log "
             "(dmesg), reset the GPU or restart the machine, and start again\n",
             device_, call.function, bytes, std::chrono::duration<double>(took).count(), why);
  std::fflush(stderr);
  std::_Exit(EXIT_FAILURE);
}

}  // namespace ziggurat
