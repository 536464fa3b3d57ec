// SPDX-License-Identifier: Apache-2.0
// core/engine/outstanding_bytes.h: what is known of a store's drives before it is opened. A pure
// function; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/engine/engine_config.h"

namespace ziggurat {

/// Returns the most that a directory's drive has in flight, as measured; 0 if none was.
inline std::uint64_t most_outstanding_bytes(std::span<const StoreDirectory> store) {
  std::uint64_t most = 0;
  for (const StoreDirectory& directory : store) most = std::max(most, directory.outstanding_bytes);
  return most;
}

}  // namespace ziggurat
