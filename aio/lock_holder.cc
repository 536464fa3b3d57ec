// SPDX-License-Identifier: Apache-2.0
// aio/lock_holder.cc: reads /proc/locks and /proc/PID/stat (man 5 proc).
#include "aio/lock_holder.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace ziggurat {
namespace {

constexpr unsigned long kExiting = 0x4;  // PF_EXITING of the kernel's include/linux/sched.h

/// The fields of a process's or a thread's stat that are of use.
struct Stat {
  std::string name;
  bool ended = false;
};

/// Reads a file of "PID (name) state ppid pgrp session tty tpgid flags ...", if this process may.
/// The name may contain parentheses.
std::optional<Stat> read_stat(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const std::size_t begin = line.find('(');
  const std::size_t end = line.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(end + 1));
  char state = 0;
  long skipped = 0;
  unsigned long flags = 0;
  rest >> state;
  for (int i = 0; i < 5; ++i) rest >> skipped;
  rest >> flags;
  const bool ended = state == 'Z' || state == 'X' || (flags & kExiting) != 0;
  return Stat{line.substr(begin + 1, end - begin - 1), ended};
}

/// Whether some thread of the process goes on. A process outlives its main thread.
bool has_live_thread(pid_t pid) {
  std::error_code failure;
  std::filesystem::directory_iterator thread(fmt::format("/proc/{}/task", pid), failure);
  for (; !failure && thread != std::filesystem::directory_iterator(); thread.increment(failure)) {
    const std::optional<Stat> its = read_stat(thread->path().string() + "/stat");
    if (its && !its->ended) return true;
  }
  return false;
}

LockHolder process(pid_t pid) {
  const std::optional<Stat> main = read_stat(fmt::format("/proc/{}/stat", pid));
  if (main) return {pid, main->name, main->ended && !has_live_thread(pid)};
  // Where /proc hides other users' processes (hidepid) a signal tells whether there is one.
  const bool there = ::kill(pid, 0) == 0 || errno == EPERM;
  return {pid, "", !there};
}

std::optional<LockHolder> find_in_locks(const std::string& file) {
  // "NUMBER: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF"; "->" before FLOCK: one that waits
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, access, its_file;
    pid_t pid = 0;
    words >> number >> kind >> advisory >> access >> pid >> its_file;
    if (kind == "FLOCK" && pid > 0 && its_file == file) return process(pid);
  }
  return std::nullopt;
}

}  // namespace

std::optional<LockHolder> lock_holder(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return std::nullopt;
  const std::string file =
      fmt::format("{:02x}:{:02x}:{}", major(status.st_dev), minor(status.st_dev), status.st_ino);
  std::optional<LockHolder> found = find_in_locks(file);
  // The list is read in several pieces, and skips entries when others end in between.
  if (!found) found = find_in_locks(file);
  return found;
}

}  // namespace ziggurat
