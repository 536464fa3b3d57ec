// SPDX-License-Identifier: Apache-2.0
// base/topology/limits.h: what this machine and its administrator allow this process: memory, huge
// pages, io_uring, disks.
//
// Everything is read from the machine at each call. `root` is put before /proc and /sys, so that
// tests can build a small machine under it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace ziggurat {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

/// Returns the soft RLIMIT_MEMLOCK: the bytes that may be locked or registered without privilege.
std::uint64_t memlock_limit_bytes();

/// The lowest memory limit of this process's control group and its parents.
struct CgroupMemory {
  int version = 0;   ///< 1 or 2; 0 if no memory controller can be seen
  std::string path;  ///< the group that sets the limit; this process's group if none does
  std::uint64_t limit_bytes = kUnlimited;
  std::uint64_t usage_bytes = 0;  ///< usage of that same group, page cache included
};
CgroupMemory cgroup_memory(const std::string& root = "");

/// Returns how much memory this process may still take: what the machine has left, or less where
/// the limit of a control group on the way up leaves less. Pages of files count as free, because
/// the kernel gives them up before it refuses memory. 0 if /proc does not tell.
std::uint64_t free_memory_bytes(const std::string& root = "");

/// Returns how many CPUs' worth of time this process's control groups allow: the lowest limit on
/// the way up to the root. Infinity if none limits it.
double cgroup_cpus(const std::string& root = "");

struct HugePages {
  std::uint64_t reserved = 0;  ///< 2 MiB pages in the kernel's pool
  std::uint64_t free = 0;      ///< pages of these that are not in use
  std::string transparent;     ///< "always", "madvise", "never"; empty if the kernel has none
};
HugePages huge_pages(const std::string& root = "");

/// Returns kernel.io_uring_disabled: 0 allowed, 1 for privileged processes only, 2 forbidden; -1 if
/// this kernel has no such switch. A seccomp filter may forbid io_uring all the same, so only a try
/// tells.
int io_uring_disabled(const std::string& root = "");

/// Returns a number that all processes on this machine get until it starts again, and processes on
/// other machines do not: a hash of the kernel's boot id, or of the host's name without one.
std::uint64_t machine_number(const std::string& root = "");

/// Returns the kernel's release, like "6.1.0-18-amd64".
std::string kernel_release();

struct Filesystem {
  std::string type;    ///< "ext4", "xfs", "tmpfs"; empty if mountinfo does not tell
  std::string source;  ///< "/dev/nvme0n1p2"
  std::string mount_point;
  bool read_only = false;
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  ///< bytes that this user may still write
};
/// Returns the filesystem of `path`, or of its nearest existing parent. Errors: those of statvfs,
/// naming the path.
Filesystem filesystem_of(const std::string& path, const std::string& root = "");

/// Returns `path` if it exists, otherwise its nearest existing parent ("/" at worst, "." for a
/// relative path).
std::string nearest_existing(const std::string& path);

}  // namespace ziggurat
