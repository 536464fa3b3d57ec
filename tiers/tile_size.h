// SPDX-License-Identifier: Apache-2.0
// tiers/tile_size.h: the quantum of records: what is updated, hashed and padded as one.
#pragma once

#include <cstddef>

namespace ziggurat {

/// 64 KiB: 16,384 fp32 elements. Every array of a record is a whole number of tiles of elements
/// long (zero padded).
inline constexpr std::size_t kTileBytes = 64 * 1024;
inline constexpr std::size_t kTileElements = kTileBytes / sizeof(float);

}  // namespace ziggurat
