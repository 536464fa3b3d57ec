// SPDX-License-Identifier: Apache-2.0
// tiers/store/record_format.cc: computes sums of segment sizes.
#include "tiers/store/record_format.h"

#include <fmt/format.h>

#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {

RecordFormat::RecordFormat(std::vector<Segment> segments) : segments_(std::move(segments)) {
  for (const Segment& segment : segments_) {
    // If both hold, no piece crosses a tile boundary, because it begins at a multiple of its size,
    // which divides kTileBytes.
    const bool divides = segment.tile_bytes > 0 && kTileBytes % segment.tile_bytes == 0;
    if (!divides || tile_bytes_ % segment.tile_bytes != 0)
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format(
              "record segment '{}' has {} bytes per tile, after {} bytes of other segments, but "
              "its size must divide {} and the bytes before it; put large segments first",
              segment.name, segment.tile_bytes, tile_bytes_, kTileBytes));
    tile_bytes_ += segment.tile_bytes;
  }
  if (tile_bytes_ < kTileBytes)  // otherwise tiles() could not tell a tile from padding
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("records have {} bytes per tile, but need at least {}", tile_bytes_,
                            kTileBytes));
}

std::uint64_t RecordFormat::record_bytes(std::uint64_t tiles) const noexcept {
  return round_up(tiles * tile_bytes_, kTileBytes);
}

std::uint64_t RecordFormat::tiles(std::uint64_t record_bytes) const noexcept {
  return record_bytes / tile_bytes_;
}

std::uint64_t RecordFormat::offset(std::size_t index, std::uint64_t tiles) const noexcept {
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < index; ++i) before += segments_[i].tile_bytes;
  return before * tiles;
}

std::string RecordFormat::text() const {
  std::string text;
  for (const Segment& segment : segments_) {
    if (!text.empty()) text += ", ";
    text += segment.name;
  }
  return text;
}

}  // namespace ziggurat
