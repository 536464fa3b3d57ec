// SPDX-License-Identifier: Apache-2.0
// base/log.h: one logger, to stderr, and the list of degraded modes that `ziggurat doctor` shows.
#pragma once

#include <spdlog/logger.h>

#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

/// The process's logger (level from ZIGGURAT_LOG=debug|info|warn|error|off, default warn).
/// Thread-safe.
spdlog::logger& log();

/// Notes that a degraded mode is in use: logs it the first time `key` is seen, and keeps it for
/// degraded_modes(). Thread-safe.
void note_degraded(std::string_view key, std::string_view explanation);

/// Returns "key: explanation" of every degraded mode noted so far, in order.
std::vector<std::string> degraded_modes();

}  // namespace ziggurat
