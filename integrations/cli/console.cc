// SPDX-License-Identifier: Apache-2.0
// integrations/cli/console.cc: writes the live line as a carriage return, the text cut to the
// window's width, and the code that erases the rest of the line.
#include "integrations/cli/console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat::cli {
namespace {

constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::seconds kPlainInterval{2};
constexpr std::chrono::seconds kSilence{1};

std::size_t window_columns() {
  struct winsize size {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

Console::Console() : terminal_(::isatty(STDOUT_FILENO) != 0) {}

Console::~Console() {
  const std::lock_guard lock(mutex_);
  if (live_shown_) put("\n");
}

bool Console::whole() {
  const std::lock_guard lock(mutex_);
  return !lost_;
}

void Console::put(const std::string& text) {
  if (lost_) return;
  const bool put = std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
  if (put) return;
  lost_ = true;
  std::fputs(
      fmt::format(
          "ziggurat: error: cannot write to standard output: {}; further output is not shown\n",
          errno_text(errno))
          .c_str(),
      stderr);
}

void Console::line(std::string_view text) {
  if (silent_) return;
  const std::lock_guard lock(mutex_);
  put(fmt::format("{}{}\n", live_shown_ ? "\r\x1b[K" : "", text));
  live_shown_ = false;
}

void Console::live(std::string_view text, bool always_plain) {
  const std::lock_guard lock(mutex_);
  show(text, always_plain);
}

void Console::show(std::string_view text, bool always_plain) {
  if (silent_) return;
  const Clock::time_point now = Clock::now();
  if (terminal_) {
    if (now - last_live_ < kRedraw) return;
    put(fmt::format("\r{}\x1b[K", text.substr(0, window_columns() - 1)));
    live_shown_ = true;
  } else {
    if (!always_plain && now - last_live_ < kPlainInterval) return;
    put(fmt::format("{}\n", text));
  }
  last_live_ = now;
}

void Console::progress(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes) {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (progress_what_ != what) {
    progress_what_ = what;
    progress_begin_ = now;
  }
  if (now - progress_begin_ < kSilence) return;
  const double seconds = std::chrono::duration<double>(now - progress_begin_).count();
  const double rate = static_cast<double>(done_bytes) / seconds;
  const auto left = static_cast<double>(total_bytes - std::min(done_bytes, total_bytes));
  show(fmt::format("{}: {} of {}, {:.2f} GB/s, {:.0f} s to go", what, format_bytes(done_bytes),
                   format_bytes(total_bytes), rate / 1e9, rate > 0 ? left / rate : 0.0),
       false);
}

}  // namespace ziggurat::cli
