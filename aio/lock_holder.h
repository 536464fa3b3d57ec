// SPDX-License-Identifier: Apache-2.0
// aio/lock_holder.h: finds the process that holds a file's lock, for messages, and to tell one that
// has ended from one that has not: the kernel keeps the lock of a killed process until its last
// writes are done.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace ziggurat {

struct LockHolder {
  pid_t pid = 0;
  std::string name;    ///< empty if the process is gone, or hidden from this one
  bool ended = false;  ///< whether the process is gone, is ending, or was killed
};

/// Whether a thread has ended, is ending, or was killed and only waits for a drive, by its `stat`:
/// the line of /proc/PID/task/TID/stat.
bool thread_ended(const std::string& stat);

/// Returns the process that took the flock() of the open file `fd`. Empty where the kernel does not
/// tell, as of a process of another container.
std::optional<LockHolder> lock_holder(int fd);

}  // namespace ziggurat
