// SPDX-License-Identifier: Apache-2.0
// tiers/record_hash.h: the checksum of a record: a hash of the hashes of its 64 KiB tiles, under a
// seed that says which record of which generation it is. Tiles are hashed while they are in cache
// for other reasons (the optimizer's pass).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/checksum.h"

namespace ziggurat {

/// 64 KiB: 16,384 fp32 elements. Every array of a record is a whole number of tiles long (zero
/// padded).
inline constexpr std::size_t kTileBytes = 64 * 1024;
inline constexpr std::size_t kTileElements = kTileBytes / sizeof(float);

/// Tile hashes in the order of their offset in the record; they may be set in any order, from one
/// thread at a time.
class RecordHash {
 public:
  explicit RecordHash(std::uint64_t record_bytes)
      : tiles_((record_bytes + kTileBytes - 1) / kTileBytes) {}
  void set_tile(std::size_t index, std::span<const std::byte> tile) noexcept {
    tiles_[index] = hash64(tile, 0);
  }
  std::size_t tiles() const noexcept { return tiles_.size(); }
  std::uint64_t finish(std::uint64_t seed) const noexcept {
    return hash64(std::as_bytes(std::span(tiles_)), seed);
  }

 private:
  std::vector<std::uint64_t> tiles_;
};

/// The same in one pass over a whole record.
std::uint64_t record_hash(std::span<const std::byte> record, std::uint64_t seed);

}  // namespace ziggurat
