// SPDX-License-Identifier: Apache-2.0
// integrations/cli/console.h: standard output: plain lines, and one live line at the bottom where
// it is a terminal.
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
  ~Console();  ///< leaves a terminal on a fresh line
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  bool terminal() const noexcept { return terminal_; }
  /// Nothing is shown from now on: another rank speaks.
  void silence() noexcept { silent_ = true; }
  /// All that was to be shown was. What cannot be (a terminal that was closed, a full disk) is said
  /// once on standard error, and ends nothing.
  bool whole();

  /// A line that stays; flushed before it returns.
  void line(std::string_view text);
  /// The state of things: rewrites the live line, at most ten times a second; where output is not a
  /// terminal, a plain line, at most every two seconds, or always where `always_plain`.
  void live(std::string_view text, bool always_plain = false);
  /// live() for work that counts bytes; says nothing in the first second, so that short work stays
  /// silent.
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
