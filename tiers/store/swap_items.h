// SPDX-License-Identifier: Apache-2.0
// tiers/store/swap_items.h: the room of an item in a swap file (swap_file.h), for who plans one.
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace ziggurat {

/// Items begin at multiples of this, which every direct-I/O alignment that is accepted divides.
inline constexpr std::uint64_t kSwapItemAlignment = 64 * kKiB;

/// Returns what an item of `size_bytes` takes of the file.
constexpr std::uint64_t swap_item_bytes(std::uint64_t size_bytes) noexcept {
  return round_up(size_bytes, kSwapItemAlignment);
}

}  // namespace ziggurat
