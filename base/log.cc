// SPDX-License-Identifier: Apache-2.0
// base/log.cc: logger set-up; the process-wide list of degraded modes (facts about the machine, so
// global is right).
#include "base/log.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <algorithm>
#include <cstdlib>
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
  static DegradedModes instance;
  return instance;
}

}  // namespace

spdlog::logger& log() {
  static const std::unique_ptr<spdlog::logger> instance = [] {
    auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
    auto logger = std::make_unique<spdlog::logger>("ziggurat", std::move(sink));
    logger->set_pattern("ziggurat: %^%l%$: %v");
    const char* level = std::getenv("ZIGGURAT_LOG");
    logger->set_level(level != nullptr ? spdlog::level::from_str(level) : spdlog::level::warn);
    return logger;
  }();
  return *instance;
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
  for (const auto& [key, explanation] : all.entries) {
    lines.push_back(fmt::format("{}: {}", key, explanation));
  }
  return lines;
}

}  // namespace ziggurat
