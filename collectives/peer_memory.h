// SPDX-License-Identifier: Apache-2.0
// collectives/peer_memory.h: the memory of another rank's process on this host, read directly: one
// copy, on the reader's worker, where a socket takes two and a system call on each side.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ziggurat {

/// The same text for all ranks of a host, and no others. Containers with a network of their own
/// count as hosts. Errors: kUnavailable without /proc.
std::string this_host();

/// Something of a process that others may try to read.
struct MemoryProbe {
  std::int64_t process = 0;  ///< 0: none
  std::uint64_t address = 0;
  std::uint64_t value = 0;
};

/// Of this process. Where Yama lets a process be read by its ancestors only (ptrace_scope 1),
/// allows all of the same user.
MemoryProbe own_memory_probe();

/// Why the process that `probe` describes cannot be read; empty if it can.
std::string why_not_readable(const MemoryProbe& probe);

/// Any thread. Errors: kUnavailable, as "is gone: .." or "cannot be read: ..".
void read_memory(std::int64_t process, std::uint64_t address, std::span<std::byte> into);

}  // namespace ziggurat
