// SPDX-License-Identifier: Apache-2.0
// tiers/store/record_format.h: the arrays of which a record consists, so that a store can size and
// verify it without knowing what they mean.
//
// A record of n tiles of elements is its segments one after the other, each n times as long as its
// piece for one tile, then zeros up to whole kTileBytes:
//
//   split AdamW, 2 tiles:  param 2 x 32 KiB | residual 2 x 32 KiB | exp_avg 2 x 64 KiB | exp_avg_sq
//
// A piece (segment, tile) is hashed at once, and never crosses a multiple of kTileBytes. So a
// reader may take the record in parts of any multiple of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tiers/store/tile_size.h"

namespace ziggurat {

class RecordFormat {
 public:
  struct Segment {
    std::string name;          ///< what the segment holds and how: "exp_avg bf16"
    std::uint32_t tile_bytes;  ///< bytes for one tile of elements
    friend bool operator==(const Segment&, const Segment&) = default;
  };

  /// Makes a format of bytes without meaning, in tiles of kTileBytes. fp32 arrays have the same
  /// hash in this format as in one that names them.
  RecordFormat() : RecordFormat({{"bytes", kTileBytes}}) {}
  /// Errors: kInvalidArgument, naming the segment whose pieces would cross a tile boundary.
  explicit RecordFormat(std::vector<Segment> segments);

  std::span<const Segment> segments() const noexcept { return segments_; }
  /// Returns the bytes of one tile of elements, in all segments.
  std::uint64_t tile_bytes() const noexcept { return tile_bytes_; }
  /// Returns the bytes of a record of `tiles`, padding included.
  std::uint64_t record_bytes(std::uint64_t tiles) const noexcept;
  /// Returns how many tiles of elements a record of `record_bytes` has.
  std::uint64_t tiles(std::uint64_t record_bytes) const noexcept;
  /// Returns where segment `index` of a record of `tiles` begins.
  std::uint64_t offset(std::size_t index, std::uint64_t tiles) const noexcept;
  /// Returns the segments by name, separated by commas: a part of a store's layout.
  std::string text() const;

  friend bool operator==(const RecordFormat&, const RecordFormat&) = default;

 private:
  std::vector<Segment> segments_;
  std::uint64_t tile_bytes_ = 0;
};

}  // namespace ziggurat
