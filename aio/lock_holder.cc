// SPDX-License-Identifier: Apache-2.0
// aio/lock_holder.cc: reads /proc/locks and /proc/PID/stat (man 5 proc).
#include "aio/lock_holder.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace ziggurat {
namespace {

constexpr unsigned long kExiting = 0x4;  // PF_EXITING of the kernel's include/linux/sched.h
constexpr unsigned long kKilled = 1UL << (SIGKILL - 1);  // in a set of signals
/// Fields of a stat, counted from 1 (man 5 proc).
constexpr int kState = 3;
constexpr int kFlags = 9;
constexpr int kPendingSignals = 31;

/// The fields of a process's or a thread's stat that are of use.
struct Stat {
  std::string name;
  bool ended = false;
};

/// Reads a stat, if this process may.
std::optional<Stat> read_stat(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const std::size_t begin = line.find('(');
  const std::size_t end = line.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return std::nullopt;
  return Stat{line.substr(begin + 1, end - begin - 1), thread_ended(line)};
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

bool thread_ended(const std::string& stat) {
  // The name, which is in parentheses, may contain some.
  std::istringstream rest(stat.substr(stat.rfind(')') + 1));
  std::string word;
  for (int field = kState; rest >> word; ++field) {
    if (field == kState && (word == "Z" || word == "X")) return true;
    if (field == kFlags && (std::strtoul(word.c_str(), nullptr, 10) & kExiting) != 0) return true;
    // It was killed, but waits for a drive first.
    if (field == kPendingSignals) return (std::strtoul(word.c_str(), nullptr, 10) & kKilled) != 0;
  }
  return false;
}

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
