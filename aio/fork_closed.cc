// SPDX-License-Identifier: Apache-2.0
// aio/fork_closed.cc: keeps the descriptors in a table that the child's fork handler reads without
// a lock.
#include "aio/fork_closed.h"

#include <errno.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

constexpr int kFree = -1;

/// The process's table. It is never destroyed, because a child may be forked at any time.
std::array<std::atomic<int>, 1024>& table() {
  static auto& slots = *[] {
    auto* made = new std::array<std::atomic<int>, 1024>;
    for (std::atomic<int>& slot : *made) slot = kFree;
    return made;
  }();
  return slots;
}

/// Runs in the child, where only calls that are safe in a signal handler may be made.
void close_all() {
  for (std::atomic<int>& slot : table()) {
    const int fd = slot.exchange(kFree);
    if (fd != kFree) ::close(fd);
  }
}

}  // namespace

void close_in_children(int fd) {
  static const int registered = [] {
    table();
    return ::pthread_atfork(nullptr, nullptr, close_all);
  }();
  for (std::atomic<int>& slot : table()) {
    int expected = kFree;
    if (registered == 0 && slot.compare_exchange_strong(expected, fd)) return;
  }
  note_degraded(
      "fork",
      "more files are open than can be closed in forked children: after this process is killed, "
      "its store stays in use until its children have ended");
}

void forget_for_children(int fd) noexcept {
  for (std::atomic<int>& slot : table()) {
    int expected = fd;
    if (slot.compare_exchange_strong(expected, kFree)) return;
  }
}

void keep_out_of_children(std::span<std::byte> pages, std::string_view owner) {
  if (::madvise(pages.data(), pages.size(), MADV_DONTFORK) == 0) return;
  note_degraded(
      "fork",
      fmt::format(
          "forked children cannot be kept from the memory of {}: MADV_DONTFORK failed: {}; do not "
          "fork while training",
          owner, errno_text(errno)));
}

}  // namespace ziggurat
