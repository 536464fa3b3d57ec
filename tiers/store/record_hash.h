// SPDX-License-Identifier: Apache-2.0
// tiers/store/record_hash.h: the checksum of a record: a hash of the hashes of its pieces (segment,
// tile), in the order of their offsets, under a seed that says which record of which generation it
// is. Pieces are hashed while they are in cache for other reasons (the optimizer's pass). Padding
// is not hashed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "tiers/store/record_format.h"

namespace ziggurat {

/// Collects the hashes of pieces. They may be set in any order, from one thread at a time.
class RecordHash {
 public:
  RecordHash(const RecordFormat& format, std::uint64_t record_bytes);

  void set_piece(std::size_t segment, std::size_t tile, std::uint64_t hash) noexcept {
    pieces_[segment * tiles_ + tile] = hash;
  }
  /// Hashes every piece in `bytes`, which begin at `offset_bytes` of the record. Both the offset
  /// and the size are whole multiples of kTileBytes.
  void add(std::uint64_t offset_bytes, std::span<const std::byte> bytes) noexcept;
  std::uint64_t finish(std::uint64_t seed) const noexcept {
    return hash64(std::as_bytes(std::span(pieces_)), seed);
  }

 private:
  struct Run {  // the pieces of a segment
    std::uint64_t begin, end;
    std::size_t piece_bytes;
    std::size_t first;  // index in pieces_
  };
  std::size_t tiles_;
  std::vector<Run> runs_;
  std::vector<std::uint64_t> pieces_;
};

/// Returns the checksum of a whole record in one pass.
std::uint64_t record_hash(std::span<const std::byte> record, std::uint64_t seed,
                          const RecordFormat& format = {});

}  // namespace ziggurat
