// SPDX-License-Identifier: Apache-2.0
// base/log.h: one logger, to stderr, and the list of degraded modes that `ziggurat doctor` shows.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

enum class LogLevel { kDebug, kInfo, kWarn, kError, kOff };

/// Writes messages of its level and above, each a line. Thread-safe. A message that cannot be
/// written is lost, because what is logged must not end what is done.
class Log {
 public:
  template <typename... T>
  void debug(fmt::format_string<T...> format, T&&... values) noexcept {
    write(LogLevel::kDebug, format, fmt::make_format_args(values...));
  }
  template <typename... T>
  void info(fmt::format_string<T...> format, T&&... values) noexcept {
    write(LogLevel::kInfo, format, fmt::make_format_args(values...));
  }
  template <typename... T>
  void warn(fmt::format_string<T...> format, T&&... values) noexcept {
    write(LogLevel::kWarn, format, fmt::make_format_args(values...));
  }
  template <typename... T>
  void error(fmt::format_string<T...> format, T&&... values) noexcept {
    write(LogLevel::kError, format, fmt::make_format_args(values...));
  }
  void set_level(LogLevel level) noexcept;

 private:
  // Formats in log.cc alone: formatting takes a compiler seconds for each file that does it.
  void write(LogLevel level, fmt::string_view format, fmt::format_args values) noexcept;
};

/// The process's log (level from ZIGGURAT_LOG=debug|info|warn|error|off, default warn).
Log& log();

/// Notes that a degraded mode is in use: logs it the first time `key` is seen, and keeps it for
/// degraded_modes(). Thread-safe.
void note_degraded(std::string_view key, std::string_view explanation);

/// Returns "key: explanation" of every degraded mode noted so far, in order.
std::vector<std::string> degraded_modes();

}  // namespace ziggurat
