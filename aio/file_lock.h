// SPDX-License-Identifier: Apache-2.0
// aio/file_lock.h: takes the lock of an open file for this process, and waits for the process that
// has it: as long as the caller says, a minute for the last writes of one that has ended, and no
// more than a second for this process itself, whose close may have to wait for this call.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "aio/lock_holder.h"

namespace ziggurat {

/// How long the last writes of a process that has ended may take, on a drive that others keep busy.
inline constexpr std::chrono::milliseconds kLastWritesWait{60'000};
inline constexpr std::chrono::milliseconds kOwnLockWait{1'000};

struct LockRequest {
  int fd = -1;
  std::string path;                               ///< for messages
  std::chrono::milliseconds wait{0};              ///< 0: tries once
  std::chrono::steady_clock::time_point begin{};  ///< of the wait
};

/// Finds who holds the lock of an open file. Tests answer in place of the kernel.
using FindHolder = std::function<std::optional<LockHolder>(int fd)>;

/// Takes the lock (flock(LOCK_EX)). Errors: kUnavailable with EWOULDBLOCK, which names the holder.
void lock_file(const LockRequest& request, const FindHolder& find = lock_holder);

}  // namespace ziggurat
