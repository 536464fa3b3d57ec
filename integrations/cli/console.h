// SPDX-License-Identifier: Apache-2.0
// integrations/cli/console.h: standard output as plain lines and, on a terminal, one live line at
// the bottom.
//
// Thread-safe: the engine reports its progress from its own thread.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat::cli {

class Console {
 public:
  Console();
  ~Console();  ///< leaves the terminal on a fresh line
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// Stops all output, because another rank writes for the whole job.
  void silence() noexcept { silent_ = true; }
  /// Returns whether all output was written. The first failure (a terminal that was closed, a full
  /// disk) is reported once on standard error, and the program goes on.
  bool whole();

  /// Writes a line that stays, and flushes it.
  void line(std::string_view text);
  /// Shows the current state. On a terminal this rewrites the live line, at most ten times a
  /// second; elsewhere it writes a plain line, at most every two seconds, or always if
  /// `always_plain`.
  void live(std::string_view text, bool always_plain = false);
  /// Shows, like live(), how many bytes of the work are done. Shows nothing in the first second, so
  /// that short work stays silent.
  void progress(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  void show(std::string_view text, bool always_plain);
  void put(const std::string& text);

  std::mutex mutex_;
  const bool terminal_;
  std::atomic<bool> silent_ = false;
  bool live_shown_ = false;
  bool lost_ = false;
  Clock::time_point last_live_{};
  std::string progress_what_;
  Clock::time_point progress_begin_{};
};

}  // namespace ziggurat::cli
