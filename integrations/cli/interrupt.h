// SPDX-License-Identifier: Apache-2.0
// integrations/cli/interrupt.h: signals, from the start of main() to the exit: SIGINT, SIGTERM and
// SIGHUP ask for an end, SIGUSR1 for a checkpoint.
//
// One wish may arrive several times. Schedulers tell every process of a job (systemd, a terminal,
// timeout), and the launcher passes on what it was told: a rank then has two. So what comes within
// a moment of the first is the first once more, and so is the first one that a parent passes on,
// however late. SIGHUP means an end only where it was not ignored at the start (nohup).
//
// Signals belong to the process, and so does what is kept here.
#pragma once

#include <signal.h>

namespace ziggurat::cli {

inline constexpr int kExitInterrupted = 130;

/// What the first signal that asks for an end does.
enum class OnInterrupt {
  kExit,    ///< ends the process at once (130): nothing is finished that could be made durable
  kFinish,  ///< is remembered: the step under way is finished first. A second one, later, ends the
            ///< process at once (130), which loses nothing that is durable
};

/// The first thing in main(): opens /dev/null where standard input, output or error is closed, or a
/// store's file would take its number and what is printed would go into the store. False where that
/// cannot be done.
bool open_standard_streams() noexcept;

/// The second: from now on SIGUSR1 ends this process no more, and what the launcher held back while
/// it became this program arrives. Signals that ask for an end do what they do by default.
void take_signals() noexcept;

/// A training run: from now until the exit they do `what`. A standard output that nobody reads any
/// more is an error of write(), not a signal.
void on_interrupt(OnInterrupt what) noexcept;

bool interrupt_requested() noexcept;
/// SIGUSR1 has come since this was asked last: a checkpoint is wanted.
bool take_save_request() noexcept;

/// SIGINT, SIGTERM, SIGUSR1, and SIGHUP where it was not ignored at the start.
sigset_t run_signals() noexcept;

}  // namespace ziggurat::cli
