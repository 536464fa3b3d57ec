// SPDX-License-Identifier: Apache-2.0
// tiers/record_hash.h: the checksum of a record: a hash of the hashes of its pieces (segment,
// tile), in the order of their offsets, under a seed that says which record of which generation it
// is. Pieces are hashed while they are in cache for other reasons (the optimizer's pass). Padding
// is not hashed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "tiers/record_format.h"

namespace ziggurat {

/// Piece hashes may be set in any order, from one thread at a time.
class RecordHash {
 public:
  RecordHash(const RecordFormat& format, std::uint64_t record_bytes);

  void set_piece(std::size_t segment, std::size_t tile, std::uint64_t hash) noexcept {
    pieces_[segment * tiles_ + tile] = hash;
  }
  /// Every piece in `bytes`, which begin at `offset_bytes` of the record and are whole multiples of
  /// kTileBytes, as is the offset.
  void add(std::uint64_t offset_bytes, std::span<const std::byte> bytes) noexcept;
  std::uint64_t finish(std::uint64_t seed) const noexcept {
    return hash64(std::as_bytes(std::span(pieces_)), seed);
  }

 private:
  struct Run {  // a segment's pieces
    std::uint64_t begin, end;
    std::size_t piece_bytes;
    std::size_t first;  // in pieces_
  };
  std::size_t tiles_;
  std::vector<Run> runs_;
  std::vector<std::uint64_t> pieces_;
};

/// The same in one pass over a whole record.
std::uint64_t record_hash(std::span<const std::byte> record, std::uint64_t seed,
                          const RecordFormat& format = {});

}  // namespace ziggurat
