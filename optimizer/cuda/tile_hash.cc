// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/tile_hash.cc: hashes a record's segments with one kernel each.
#include "optimizer/cuda/tile_hash.h"

#include <fmt/format.h>

#include "base/check.h"
#include "base/error.h"
#include "optimizer/cuda/tile_hash_programs.h"

namespace ziggurat::cuda {

void hash_pieces(StreamHandle stream, std::span<const std::byte> bytes, std::size_t piece_bytes,
                 std::span<std::uint64_t> hashes) {
  using namespace internal::xxh3;
  if (piece_bytes < kLongBytes || piece_bytes > kTileBytes || piece_bytes % kStripeBytes != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "hash_pieces cannot hash pieces of {} bytes; give a multiple of {} from {} to {}",
            piece_bytes, kStripeBytes, 256, kTileBytes));
  }
  ZIGGURAT_CHECK(bytes.size() == hashes.size() * piece_bytes, "{} bytes for {} hashes of {} each",
                 bytes.size(), hashes.size(), piece_bytes);
  require_aligned("hashed memory", bytes.data(), sizeof(std::uint64_t));
  require_aligned("hashes", hashes.data(), sizeof(std::uint64_t));
  launch(HashPieces{bytes.data(), piece_bytes, hashes.size(), hashes.data()}, stream);
}

void hash_record_pieces(StreamHandle stream, std::span<const std::byte> record,
                        const RecordFormat& format, std::span<std::uint64_t> hashes) {
  const std::size_t tiles = format.tiles(record.size());
  ZIGGURAT_CHECK(hashes.size() == format.segments().size() * tiles,
                 "{} hashes for {} segments of {} tiles", hashes.size(), format.segments().size(),
                 tiles);
  for (std::size_t index = 0; index < format.segments().size(); ++index) {
    const std::size_t piece_bytes = format.segments()[index].tile_bytes;
    hash_pieces(stream, record.subspan(format.offset(index, tiles), tiles * piece_bytes),
                piece_bytes, hashes.subspan(index * tiles, tiles));
  }
}

}  // namespace ziggurat::cuda
