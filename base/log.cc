// SPDX-License-Identifier: Apache-2.0
// base/log.cc: makes the logger and keeps the list of degraded modes. The list is global to the
// process, because degraded modes are facts about the machine.
#include "base/log.h"

#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace ziggurat {
namespace {

struct DegradedModes {
  std::mutex mutex;
  std::vector<std::pair<std::string, std::string>> entries;
};

DegradedModes& modes() {
  static DegradedModes& instance = *new DegradedModes;  // never destroyed, because threads log
                                                        // until the process ends
  return instance;
}

/// Makes the logger. It is never destroyed, because threads log until the process ends.
spdlog::logger& make_logger() {
  auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  auto& logger = *new spdlog::logger("ziggurat", std::move(sink));
  logger.set_pattern("ziggurat: %^%l%$: %v");
  logger.set_level(spdlog::level::warn);
  if (const char* wanted = std::getenv("ZIGGURAT_LOG")) {
    const auto level = spdlog::level::from_str(wanted);  // spdlog returns "off" for a name that it
                                                         // does not know
    if (level == spdlog::level::off && std::string_view(wanted) != "off") {
      logger.warn("ZIGGURAT_LOG={} is not a log level: use debug, info, warn, error or off",
                  wanted);
    } else {
      logger.set_level(level);
    }
  }
  return logger;
}

spdlog::logger& logger() {
  static spdlog::logger& instance = make_logger();
  return instance;
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarn: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
    case LogLevel::kOff: break;
  }
  return spdlog::level::off;
}

}  // namespace

void Log::set_level(LogLevel level) noexcept { logger().set_level(spdlog_level(level)); }

void Log::write(LogLevel level, fmt::string_view format, fmt::format_args values) noexcept {
  try {
    const auto wanted = spdlog_level(level);
    if (logger().should_log(wanted)) logger().log(wanted, fmt::vformat(format, values));
  } catch (const std::exception&) {  // no memory for the message, or for the logger
  }
}

Log& log() {
  static Log instance;
  return instance;
}

void note_degraded(std::string_view key, std::string_view explanation) {
  DegradedModes& all = modes();
  const std::lock_guard lock(all.mutex);
  const bool known = std::any_of(all.entries.begin(), all.entries.end(),
                                 [&](const auto& entry) { return entry.first == key; });
  if (known) return;
  all.entries.emplace_back(key, explanation);
  log().warn("{}: {}", key, explanation);
}

std::vector<std::string> degraded_modes() {
  DegradedModes& all = modes();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> lines;
  lines.reserve(all.entries.size());
  for (const auto& [key, explanation] : all.entries) {
    lines.push_back(fmt::format("{}: {}", key, explanation));
  }
  return lines;
}

}  // namespace ziggurat
