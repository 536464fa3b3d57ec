// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/descriptors.cc: RLIMIT_NOFILE, read and raised.
#include "collectives/rendezvous/descriptors.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <filesystem>

#include "collectives/rendezvous/acceptor.h"

namespace ziggurat {
namespace {

constexpr std::size_t kSpare = 512;  // for files, rings and pipes that the process will still open

constexpr const char* kFix =
    "raise that limit where the ranks are started (ulimit -n, LimitNOFILE=, docker --ulimit "
    "nofile=)";

std::size_t open_now() {
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  std::size_t count = 0;
  while (!error && entry != std::filesystem::directory_iterator()) {
    ++count;
    entry.increment(error);
  }
  return count;  // without /proc, what kSpare covers
}

rlimit limit() {
  rlimit now{};
  if (::getrlimit(RLIMIT_NOFILE, &now) != 0) throw system_error(errno, "getrlimit(RLIMIT_NOFILE)");
  return now;
}

}  // namespace

std::size_t descriptors_needed(int rank, int world_size) {
  const auto others = static_cast<std::size_t>(world_size) - 1;
  const std::size_t joins = rank == 0 ? others : 1;
  return 2 * others + joins + Acceptor::kHandshakesMax + kSpare + open_now();
}

void require_descriptors(int rank, int world_size) {
  const rlim_t needed = descriptors_needed(rank, world_size);
  rlimit now = limit();
  if (now.rlim_cur >= needed) return;
  if (now.rlim_max < needed) {
    throw Error(
        ErrorCode::kResourceExhausted,
        fmt::format("rank {} of {} needs {} file descriptors, among them two sockets to each other "
                    "rank, but the hard limit of this process is {} (RLIMIT_NOFILE); {}",
                    rank, world_size, needed, now.rlim_max, kFix));
  }
  // The limit is not raised further, because some programs that this one may start close every
  // number below it.
  now.rlim_cur = needed;
  if (::setrlimit(RLIMIT_NOFILE, &now) != 0)
    throw system_error(errno, fmt::format("setrlimit(RLIMIT_NOFILE, {})", needed));
}

bool out_of_descriptors(int error_number) noexcept {
  return error_number == EMFILE || error_number == ENFILE;
}

Error descriptor_error(int error_number, const std::string& what_failed) {
  const std::string whose =
      error_number == EMFILE
          ? fmt::format("this process may have {} file descriptors (RLIMIT_NOFILE); {}",
                        limit().rlim_cur, kFix)
          : std::string(
                "the whole machine has no file descriptors left (fs.file-max); end processes that "
                "hold many, or "
                "raise fs.file-max with sysctl");
  return {ErrorCode::kResourceExhausted,
          fmt::format("{}: {}; {}", what_failed, errno_text(error_number), whose), error_number};
}

}  // namespace ziggurat
