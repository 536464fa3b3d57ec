// SPDX-License-Identifier: Apache-2.0
// integrations/cli/interrupt.cc: signal handlers, which use only what a handler may use: atomics, a
// clock, write() and _exit().
#include "integrations/cli/interrupt.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string_view>

namespace ziggurat::cli {
namespace {

/// The time after the first signal within which a second one does not abort the run, because a
/// terminal and a launcher may both send a signal for one Ctrl-C.
constexpr std::int64_t kMomentNs = 1'000'000'000;

// Handlers can reach their state only through globals. Times are of a monotonic clock; 0 means that
// no signal has come yet.
std::atomic<std::int64_t> first_ns{0};
std::atomic<std::int64_t> first_of_parent_ns{0};
std::atomic<bool> exit_at_once{false};
std::atomic<bool> save_requested{false};
static_assert(std::atomic<std::int64_t>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

void say(std::string_view text) noexcept {
  // A failure is ignored, because nothing can be done about a closed stderr.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

std::int64_t now_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);  // cannot fail with these arguments
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// Sets `first` to `now` unless it was set before. Returns the time since it was set, 0 if this
/// call set it.
std::int64_t since(std::atomic<std::int64_t>& first, std::int64_t now) noexcept {
  std::int64_t before = 0;
  return first.compare_exchange_strong(before, now) ? 0 : now - before;
}

void on_end(int, siginfo_t* info, void*) {
  const int saved = errno;
  if (exit_at_once.load()) {
    say("\nziggurat: the run was interrupted before its first step; what the store held was not "
        "changed\n");
    ::_exit(kExitInterrupted);
  }
  const std::int64_t now = now_ns();
  const std::int64_t ago = since(first_ns, now);
  const bool passed_on = info->si_code <= 0 && info->si_pid == ::getppid();
  if ((passed_on ? since(first_of_parent_ns, now) : ago) >= kMomentNs) {
    say("\nziggurat: the run was aborted; run the same command again to go on from the newest "
        "durable step. An unfinished checkpoint is ignored\n");
    ::_exit(kExitInterrupted);
  }
  if (ago == 0) {
    say("\nziggurat: the run finishes this step, makes it durable, saves a checkpoint if one was "
        "asked for, and ends; interrupt again, after a second, to abort\n");
  }
  errno = saved;
}

void on_save_request(int) { save_requested.store(true); }

bool is_ignored(int signal) noexcept {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

/// Returns whether SIGHUP was ignored at the start. It is read only once, because a handler may
/// replace that setting later.
bool hangup_is_ignored() noexcept {
  static const bool ignored = is_ignored(SIGHUP);
  return ignored;
}

}  // namespace

bool open_standard_streams() noexcept {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    if (::open("/dev/null", O_RDWR) != fd) return false;  // open() takes the lowest free number
  }
  return true;
}

sigset_t run_signals() noexcept {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) ::sigaddset(&set, signal);
  if (!hangup_is_ignored()) ::sigaddset(&set, SIGHUP);
  return set;
}

void take_signals() noexcept {
  struct sigaction action {};
  action.sa_handler = &on_save_request;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGUSR1, &action, nullptr);
  const sigset_t ours = run_signals();
  ::sigprocmask(SIG_UNBLOCK, &ours, nullptr);
}

void on_interrupt(OnInterrupt what) noexcept {
  exit_at_once.store(what == OnInterrupt::kExit);
  struct sigaction action {};
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  action.sa_mask = run_signals();
  action.sa_sigaction = &on_end;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  if (!hangup_is_ignored()) ::sigaction(SIGHUP, &action, nullptr);
  action = {};
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

bool interrupt_requested() noexcept { return first_ns.load() > 0; }

bool take_save_request() noexcept { return save_requested.exchange(false); }

}  // namespace ziggurat::cli
