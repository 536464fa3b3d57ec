// SPDX-License-Identifier: Apache-2.0
// integrations/cli/interrupt.h: Ctrl-C and SIGTERM: the first asks for an end, the second is one;
// and SIGUSR1, which asks for a checkpoint.
#pragma once

namespace ziggurat::cli {

inline constexpr int kExitInterrupted = 130;

/// While it lives, SIGINT and SIGTERM set requested(); a second one ends the process at once (130),
/// which loses nothing that is durable. One at a time in a process.
class Interrupt {
 public:
  /// What the first signal does.
  enum class Mode {
    kExit,    ///< ends the process at once: nothing has been finished that could be made durable
    kFinish,  ///< is remembered; the step under way is finished first
  };
  explicit Interrupt(Mode mode);
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  void set_mode(Mode mode) noexcept;
  bool requested() const noexcept;
  /// SIGUSR1 has come since this was asked last: a checkpoint is wanted.
  bool take_save_request() noexcept;
};

}  // namespace ziggurat::cli
