// SPDX-License-Identifier: Apache-2.0
// integrations/cli/interrupt.h: handles signals from the start of main() to the exit. SIGINT,
// SIGTERM and SIGHUP ask the run to end, SIGUSR1 asks for a checkpoint.
//
// One request may arrive as several signals. Schedulers signal every process of a job (systemd, a
// terminal, timeout), and the launcher passes its own signal on, so that a rank gets two. Therefore
// a signal within a moment of the first one counts as the same request, and so does the first
// signal that a parent passes on, however late. SIGHUP ends the run only if it was not ignored at
// the start (nohup).
//
// Signals belong to the process, so the state of this file is global.
#pragma once

#include <signal.h>

namespace ziggurat::cli {

inline constexpr int kExitInterrupted = 130;

/// What happens at the first signal that asks the run to end.
enum class OnInterrupt {
  kExit,  ///< ends the process at once (130), since no step is under way to finish
  /// Ends the run after the step under way; a second signal, later, ends the process at once (130),
  /// which loses nothing durable.
  kFinish,
};

/// Opens /dev/null where standard input, output or error is closed. It must be called first in
/// main(): otherwise a store's file could take the number of a closed stream, and printed text
/// would go into the store. Returns false if /dev/null cannot be opened.
bool open_standard_streams() noexcept;

/// Makes SIGUSR1 ask for a checkpoint instead of ending the process, and unblocks the signals that
/// the launcher blocked until this program began. It must be called second in main(). Signals that
/// ask the run to end keep their default action.
void take_signals() noexcept;

/// Makes the signals that ask a run to end do `what`, from now until the exit. Ignores SIGPIPE, so
/// that writing to a standard output that nobody reads is an error of write().
void on_interrupt(OnInterrupt what) noexcept;

bool interrupt_requested() noexcept;
/// Returns whether SIGUSR1 has asked for a checkpoint since the last call.
bool take_save_request() noexcept;

/// Returns the signals that a run handles: SIGINT, SIGTERM, SIGUSR1, and SIGHUP unless it was
/// ignored at the start.
sigset_t run_signals() noexcept;

}  // namespace ziggurat::cli
