// SPDX-License-Identifier: Apache-2.0
// aio/lock_holder.cc: reads /proc/locks and /proc/PID/stat (man 5 proc).
#include "aio/lock_holder.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>
#include <sstream>

namespace ziggurat {
namespace {

constexpr unsigned long kExiting = 0x4;  // PF_EXITING of the kernel's include/linux/sched.h

/// Returns the process as /proc/PID/stat has it: "PID (name) state ppid pgrp session tty tpgid
/// flags ...". The name may contain parentheses.
LockHolder process(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const std::size_t begin = line.find('(');
  const std::size_t end = line.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return {pid, "", true};
  std::istringstream rest(line.substr(end + 1));
  char state = 0;
  long skipped = 0;
  unsigned long flags = 0;
  rest >> state;
  for (int i = 0; i < 5; ++i) rest >> skipped;
  rest >> flags;
  const bool ended = state == 'Z' || state == 'X' || (flags & kExiting) != 0;
  return {pid, line.substr(begin + 1, end - begin - 1), ended};
}

}  // namespace

std::optional<LockHolder> lock_holder(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return std::nullopt;
  const std::string file =
      fmt::format("{:02x}:{:02x}:{}", major(status.st_dev), minor(status.st_dev), status.st_ino);
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

}  // namespace ziggurat
