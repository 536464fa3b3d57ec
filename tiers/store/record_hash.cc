// SPDX-License-Identifier: Apache-2.0
// tiers/store/record_hash.cc: hashes the pieces in a part of a record, for callers that do not
// process the pieces anyway.
#include "tiers/store/record_hash.h"

#include <algorithm>

namespace ziggurat {

RecordHash::RecordHash(const RecordFormat& format, std::uint64_t record_bytes)
    : tiles_(format.tiles(record_bytes)) {
  std::uint64_t begin = 0;
  for (const RecordFormat::Segment& segment : format.segments()) {
    const std::uint64_t end = begin + tiles_ * segment.tile_bytes;
    runs_.push_back({begin, end, segment.tile_bytes, runs_.size() * tiles_});
    begin = end;
  }
  pieces_.resize(runs_.size() * tiles_);
}

void RecordHash::add(std::uint64_t offset_bytes, std::span<const std::byte> bytes) noexcept {
  const std::uint64_t end = offset_bytes + bytes.size();
  for (const Run& run : runs_) {
    // A piece lies either whole in these bytes or not at all, because it does not cross a tile
    // boundary (record_format.h).
    const std::uint64_t last = std::min(run.end, end);
    for (std::uint64_t at = std::max(run.begin, offset_bytes); at < last; at += run.piece_bytes) {
      const std::size_t index = run.first + (at - run.begin) / run.piece_bytes;
      pieces_[index] = hash64(bytes.subspan(at - offset_bytes, run.piece_bytes), 0);
    }
  }
}

std::uint64_t record_hash(std::span<const std::byte> record, std::uint64_t seed,
                          const RecordFormat& format) {
  RecordHash hash(format, record.size());
  hash.add(0, record);
  return hash.finish(seed);
}

}  // namespace ziggurat
