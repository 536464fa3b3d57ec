// SPDX-License-Identifier: Apache-2.0
// core/schedule/quantized_jobs.h: cuts what is encoded, summed or decoded into jobs for workers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/sharding/chunk_table.h"

namespace ziggurat {

/// The number of elements that one job works on: 512 KiB of 16-bit values.
inline constexpr std::uint64_t kQuantizedJobCount = 16 * kTileElements;

/// Calls `visit(first element, elements)` for each job of `count` elements.
template <class Visit>
void each_quantized_job(std::uint64_t count, const Visit& visit) {
  for (std::uint64_t first = 0; first < count; first += kQuantizedJobCount)
    visit(first, std::min(kQuantizedJobCount, count - first));
}

}  // namespace ziggurat
