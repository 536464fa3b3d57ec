// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/tile_hash_programs.h: the XXH3 of a record's pieces as a block program.
//
// What the stripes of a block (1 KiB) add to the eight lanes depends on the data alone, and
// integers may be added in any order. So a thread sums one lane of one block, for all blocks at
// once. Only the scrambles between blocks, 63 in 64 KiB, run one after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/numerics/block_program.h"
#include "base/numerics/host_device.h"
#include "base/numerics/kernel_launch.h"
#include "base/numerics/typed_value.h"
#include "optimizer/xxh3.h"
#include "tiers/store/tile_size.h"

namespace ziggurat::cuda {

/// Hashes one piece per block. Reads each byte once: 8 neighbouring threads read a stripe.
struct HashPieces {
  static constexpr std::uint32_t kThreads = 128;
  static constexpr int kPhases = 3;
  static constexpr std::size_t kBlocksMax = kTileBytes / internal::xxh3::kBlockBytes;
  struct Shared {
    std::uint64_t sums[kBlocksMax][internal::xxh3::kLanes];
    std::uint64_t lanes[internal::xxh3::kLanes];
  };

  const std::byte* bytes;
  std::size_t piece_bytes;
  std::uint64_t pieces;
  std::uint64_t* hashes;

  std::uint64_t blocks() const { return pieces; }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared& shared, Place at) const;
  ZIGGURAT_HOST_DEVICE void run(Phase<1>, Shared& shared, Place at) const;
  ZIGGURAT_HOST_DEVICE void run(Phase<2>, Shared& shared, Place at) const;

 private:
  /// Returns the number of blocks that end in a scramble: all but the block with the last byte,
  /// even if that is a whole block.
  ZIGGURAT_HOST_DEVICE std::size_t scrambled_blocks() const {
    return (piece_bytes - 1) / internal::xxh3::kBlockBytes;
  }
  /// Returns what the stripe at word `word` of a piece adds to lane `lane`.
  ZIGGURAT_HOST_DEVICE static std::uint64_t added(const std::byte* piece, std::size_t word,
                                                  std::uint32_t lane, std::uint64_t key) {
    return internal::xxh3::keyed_product(load_element<std::uint64_t>(piece, word + lane), key) +
           load_element<std::uint64_t>(piece, word + (lane ^ 1u));
  }
};

/// Sums each block's stripes. The neighbour of a lane adds the lane's word without a key; it loads
/// the word from the cache.
ZIGGURAT_HOST_DEVICE inline void HashPieces::run(Phase<0>, Shared& shared, Place at) const {
  using namespace internal::xxh3;
  constexpr std::size_t kStripeWords = kStripeBytes / 8;
  const std::byte* const piece = bytes + at.block * piece_bytes;
  const std::size_t last_block = scrambled_blocks();
  const std::uint32_t lane = at.thread % kLanes;
  for (std::size_t block = at.thread / kLanes; block <= last_block; block += kThreads / kLanes) {
    const std::size_t begin = block * kBlockBytes;
    // The last stripe of the piece has a key of its own.
    const std::size_t stripes =
        block < last_block ? kStripesPerBlock : (piece_bytes - 1 - begin) / kStripeBytes;
    std::uint64_t sum = 0;
    for (std::size_t stripe = 0; stripe < stripes; ++stripe) {
      sum += added(piece, begin / 8 + stripe * kStripeWords, lane,
                   secret_word(stripe * kSecretStep + 8 * lane));
    }
    if (block == last_block) {
      sum += added(piece, (piece_bytes - kStripeBytes) / 8, lane,
                   secret_word(kLastStripeSecret + 8 * lane));
    }
    shared.sums[block][lane] = sum;
  }
}

ZIGGURAT_HOST_DEVICE inline void HashPieces::run(Phase<1>, Shared& shared, Place at) const {
  using namespace internal::xxh3;
  if (at.thread >= kLanes) return;
  const std::uint64_t key = secret_word(kScrambleSecret + 8 * at.thread);
  const std::size_t last_block = scrambled_blocks();
  std::uint64_t lane = constants().first_lanes[at.thread];
  for (std::size_t block = 0; block < last_block; ++block)
    lane = scrambled(lane + shared.sums[block][at.thread], key);
  shared.lanes[at.thread] = lane + shared.sums[last_block][at.thread];
}

ZIGGURAT_HOST_DEVICE inline void HashPieces::run(Phase<2>, Shared& shared, Place at) const {
  if (at.thread == 0) hashes[at.block] = internal::xxh3::fold(shared.lanes, piece_bytes);
}

/// Queues a program (tile_hash.cu).
void launch(const HashPieces& program, StreamHandle stream);

}  // namespace ziggurat::cuda
