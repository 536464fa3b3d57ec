// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/quiet.cc: threads as the kernel tells of them (proc(5): stat, schedstat).
#include "tests/cuda_double/quiet.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace ziggurat::cuda_double {
namespace {

/// Empty: the thread is gone.
std::string read_file(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::string text(512, '\0');
  const auto length = ::read(file, text.data(), text.size());
  ::close(file);
  text.resize(length < 0 ? 0 : static_cast<std::size_t>(length));
  return text;
}

/// 'S': it sleeps; 0: it is gone.
char state_of(const std::string& task) {
  const std::string stat = read_file(task + "/stat");
  const std::size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? '\0' : stat[name_end + 2];
}

/// How often each other thread has been given a core, by thread; none if one runs.
std::optional<std::map<std::string, std::uint64_t>> runs_of_sleeping_threads() {
  const std::string own = std::to_string(::gettid());
  std::map<std::string, std::uint64_t> runs;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    const std::string thread = entry.path().filename();
    if (thread == own) continue;
    if (state_of(entry.path()) != 'S') return std::nullopt;
    // Time on a core, time in the queue for one, and how often.
    const std::string schedule = read_file(entry.path() / "schedstat");
    const std::size_t begin = schedule.rfind(' ');
    if (begin == std::string::npos) return std::nullopt;
    runs[thread] = std::strtoull(schedule.c_str() + begin, nullptr, 10);
  }
  return runs;
}

}  // namespace

bool all_others_sleep() {
  const auto before = runs_of_sleeping_threads();
  return before && before == runs_of_sleeping_threads();
}

bool sleeps(int thread) {
  const char state = state_of("/proc/self/task/" + std::to_string(thread));
  return state == 'S' || state == '\0';
}

}  // namespace ziggurat::cuda_double
