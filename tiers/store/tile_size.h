// SPDX-License-Identifier: Apache-2.0
// tiers/store/tile_size.h: the unit of records: what is updated, hashed and padded together.
#pragma once

#include <cstddef>

namespace ziggurat {

/// The bytes of a tile of fp32: 64 KiB, or 16,384 elements. Every array of a record has a whole
/// number of tiles (padded with zeros).
inline constexpr std::size_t kTileBytes = 64 * 1024;
inline constexpr std::size_t kTileElements = kTileBytes / sizeof(float);

}  // namespace ziggurat
