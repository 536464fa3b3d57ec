// SPDX-License-Identifier: Apache-2.0
// integrations/cli/interrupt.cc: signal handlers that do only what handlers may: atomics, write()
// and _exit().
#include "integrations/cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string_view>

namespace ziggurat::cli {
namespace {

// A handler has no other way to find its state than globals.
std::atomic<int> signals_seen{0};
std::atomic<bool> exit_at_once{false};
std::atomic<bool> save_requested{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

void say(std::string_view text) noexcept {
  // Nothing can be done about a closed stderr.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

void on_signal(int) {
  const int saved = errno;
  if (exit_at_once.load()) {
    say("\nziggurat: interrupted before the first step; what the store held is as it was\n");
    ::_exit(kExitInterrupted);
  }
  if (signals_seen.fetch_add(1) > 0) {
    say("\nziggurat: aborted; the durable generation is untouched, the same command goes on from "
        "it\n");
    ::_exit(kExitInterrupted);
  }
  say("\nziggurat: finishing the step; once more to abort\n");
  errno = saved;
}

void on_save_request(int) { save_requested.store(true); }

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(signal, &action, nullptr);
}

void install(void (*handler)(int)) {
  handle(SIGINT, handler);
  handle(SIGTERM, handler);
}

}  // namespace

Interrupt::Interrupt(Mode mode) {
  signals_seen.store(0);
  set_mode(mode);
  install(&on_signal);
  save_requested.store(false);
  handle(SIGUSR1, &on_save_request);
}

Interrupt::~Interrupt() {
  install(SIG_DFL);
  handle(SIGUSR1, SIG_DFL);
}

bool Interrupt::take_save_request() noexcept { return save_requested.exchange(false); }

void Interrupt::set_mode(Mode mode) noexcept { exit_at_once.store(mode == Mode::kExit); }

bool Interrupt::requested() const noexcept { return signals_seen.load() > 0; }

}  // namespace ziggurat::cli
