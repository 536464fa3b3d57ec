// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/peer_memory.h: reads the memory of another rank's process on this host
// directly: one copy, on the reader's worker. A socket takes two copies, and a system call on each
// side.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

namespace ziggurat {

/// Returns a text that is equal for all ranks of a host and no other ranks. Containers with a
/// network of their own count as hosts. Errors: kUnavailable without /proc.
std::string this_host();

/// A number in a process's memory, and where it lies. Other ranks try to read it.
struct MemoryProbe {
  std::int64_t process = 0;  ///< 0 if there is none
  std::uint64_t address = 0;
  std::uint64_t value = 0;
};

MemoryProbe own_memory_probe();

/// Lets processes of the same user read this one until every returned object is gone. Needed if
/// Yama lets only ancestors read a process (ptrace_scope 1). Errors: prctl's.
std::shared_ptr<const void> allow_reading();

/// Counts users of a permission: calls `set` with true when the first comes, and with false when
/// the last is gone. Any thread.
class Permission {
 public:
  explicit Permission(std::function<void(bool)> set) : set_(std::move(set)) {}
  std::shared_ptr<const void> take();

 private:
  std::mutex mutex_;
  std::size_t holders_ = 0;
  std::function<void(bool)> set_;
};

/// Returns why the process that `probe` describes cannot be read; empty if it can.
std::string why_not_readable(const MemoryProbe& probe);

/// Reads memory of a process. Any thread. Errors: kUnavailable, as "is gone: .." or "cannot be
/// read: ..".
void read_memory(std::int64_t process, std::uint64_t address, std::span<std::byte> into);

}  // namespace ziggurat
