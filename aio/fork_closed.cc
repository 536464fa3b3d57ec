// SPDX-License-Identifier: Apache-2.0
// aio/fork_closed.cc: a table that the child's handler can read without a lock.
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

/// One for the process. Never destroyed: a child may be forked at any time.
std::array<std::atomic<int>, 1024>& table() {
  static auto& slots = *[] {
    auto* made = new std::array<std::atomic<int>, 1024>;
    for (std::atomic<int>& slot : *made) slot = kFree;
    return made;
  }();
  return slots;
}

/// In the child, where only calls that a signal handler may make are safe.
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
  note_degraded("fork",
                "files stay open in forked children: a killed run's store is in use until "
                "they have ended");
}

void forget_for_children(int fd) noexcept {
  for (std::atomic<int>& slot : table()) {
    int expected = fd;
    if (slot.compare_exchange_strong(expected, kFree)) return;
  }
}

void keep_out_of_children(std::span<std::byte> pages, std::string_view owner) {
  if (::madvise(pages.data(), pages.size(), MADV_DONTFORK) == 0) return;
  note_degraded("fork", fmt::format("{}: MADV_DONTFORK failed: {}; do not fork while training",
                                    owner, errno_text(errno)));
}

}  // namespace ziggurat
