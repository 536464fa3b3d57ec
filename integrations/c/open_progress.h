// SPDX-License-Identifier: Apache-2.0
// integrations/c/open_progress.h: says on standard error what opening does, if it takes over two
// seconds: a large store takes minutes to fill.
#pragma once

#include <cstdint>
#include <functional>

namespace ziggurat {

/// Returns a function for EngineConfig::progress. It shows one line, which it writes over and
/// clears at the end.
std::function<void(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes)>
open_progress();

}  // namespace ziggurat
