// SPDX-License-Identifier: Apache-2.0
// base/runtime/parking.h: lets threads sleep until something may have changed: an event count on a
// Linux futex.
//
// Unlike with std::atomic::wait, a sleeper may wait for several conditions at once (the next phase,
// or a job), and a wake costs no system call if nobody sleeps. Nothing spins before it sleeps:
// callers know how long to spin.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ziggurat::internal {

class Parking {
 public:
  /// Sleeps unless `ready()`, until a wake or, rarely, for no reason, so callers loop. What `ready`
  /// reads must be written, sequentially consistent, before the wake that announces it.
  template <class Ready>
  void park_unless(Ready&& ready) noexcept {
    sleepers_.fetch_add(1);
    const std::uint32_t seen = events_.load();
    // A waker that saw no sleeper wrote its change before this thread was counted, so ready() sees
    // the change. Any other waker changes events_, and the kernel then refuses to sleep on `seen`.
    if (!ready()) {
      ::syscall(SYS_futex, &events_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1);
  }

  void wake_one() noexcept { wake(1); }
  void wake_all() noexcept { wake(INT_MAX); }

 private:
  void wake(int count) noexcept {
    events_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    ::syscall(SYS_futex, &events_, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  }

  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  alignas(64) std::atomic<std::uint32_t> events_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace ziggurat::internal
