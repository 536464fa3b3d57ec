// SPDX-License-Identifier: Apache-2.0
// tests/support/held_memory.h: memory that stops whoever touches it, so that a test holds a thread
// in the middle of reading or writing what it was lent.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

namespace ziggurat::testing {

/// One at a time in a process.
class HeldMemory {
 public:
  explicit HeldMemory(std::size_t size_bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    its_bytes_ = (size_bytes + page - 1) / page * page;
    void* const mapped =
        ::mmap(nullptr, its_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    its_begin_ = static_cast<std::byte*>(mapped);
    bytes_ = {its_begin_, size_bytes};
    struct sigaction action {};
    action.sa_sigaction = touch;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ::sigemptyset(&action.sa_mask);
    if (::sigaction(SIGSEGV, &action, &before_) != 0) std::abort();
  }
  ~HeldMemory() {
    release();
    ::sigaction(SIGSEGV, &before_, nullptr);
    ::munmap(its_begin_, its_bytes_);
  }
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// From now on a thread that touches it waits there until release().
  void hold() {
    touched_ = false;
    held_ = true;
    if (::mprotect(its_begin_, its_bytes_, PROT_NONE) != 0) std::abort();
  }
  bool touched() const noexcept { return touched_; }
  void await_touched() const noexcept {
    while (!touched_) nap();
  }
  void release() {
    if (::mprotect(its_begin_, its_bytes_, PROT_READ | PROT_WRITE) != 0) std::abort();
    held_ = false;
  }

 private:
  static void nap() noexcept {
    const timespec millisecond{.tv_sec = 0, .tv_nsec = 1'000'000};
    ::nanosleep(&millisecond, nullptr);
  }
  /// The touch is tried again when it returns.
  static void touch(int, siginfo_t* about, void*) {
    const auto* const at = static_cast<const std::byte*>(about->si_addr);
    if (at < its_begin_ || at >= its_begin_ + its_bytes_) {
      ::signal(SIGSEGV, SIG_DFL);
      return;
    }
    touched_ = true;
    while (held_) nap();
  }

  inline static std::byte* its_begin_ = nullptr;
  inline static std::size_t its_bytes_ = 0;
  inline static std::atomic<bool> touched_{false};
  inline static std::atomic<bool> held_{false};
  std::span<std::byte> bytes_;
  struct sigaction before_ {};
};

}  // namespace ziggurat::testing
