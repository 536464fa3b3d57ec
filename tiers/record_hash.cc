// SPDX-License-Identifier: Apache-2.0
// tiers/record_hash.cc: the whole-record form, for whoever has no reason of its own to walk the
// tiles.
#include "tiers/record_hash.h"

#include <algorithm>

namespace ziggurat {

std::uint64_t record_hash(std::span<const std::byte> record, std::uint64_t seed) {
  RecordHash hash(record.size());
  for (std::size_t tile = 0; tile < hash.tiles(); ++tile) {
    const std::size_t first = tile * kTileBytes;
    hash.set_tile(tile, record.subspan(first, std::min(kTileBytes, record.size() - first)));
  }
  return hash.finish(seed);
}

}  // namespace ziggurat
