// SPDX-License-Identifier: Apache-2.0
// integrations/c/open_progress.h: what opening does, said on standard error once it takes over two
// seconds: a large store takes minutes to fill.
#pragma once

#include <cstdint>
#include <functional>

namespace ziggurat {

/// For EngineConfig::progress. One line, written over, and cleared at its end.
std::function<void(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes)>
open_progress();

}  // namespace ziggurat
