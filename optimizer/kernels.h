// SPDX-License-Identifier: Apache-2.0
// optimizer/kernels.h: the seam between what is computed and with which instructions.
//
// Each operation exists as the specification (namespace scalar: plain C++, one element after the
// other) and as a Highway kernel for every target; the function outside picks by simd_target.h. All
// of them give the same bits for any input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/checksum.h"
#include "base/dtype.h"
#include "optimizer/adamw.h"

namespace ziggurat::internal {

/// A part of a record under one decay factor. Pointers need only the alignment of their elements.
struct AdamWSlice {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const bf16* grad;
  bf16* param;
  std::size_t count;
  float decay_factor;
};

/// Elements [begin, end) of `slice`.
inline AdamWSlice part_of(const AdamWSlice& slice, std::size_t begin, std::size_t end) {
  return {.master = slice.master + begin,
          .exp_avg = slice.exp_avg + begin,
          .exp_avg_sq = slice.exp_avg_sq + begin,
          .grad = slice.grad + begin,
          .param = slice.param + begin,
          .count = end - begin,
          .decay_factor = slice.decay_factor};
}

/// hash64 (seed 0) of a tile of master, exp_avg and exp_avg_sq, as it came and as it is left.
struct TileHashes {
  std::uint64_t before[3];  ///< unset where not asked for
  std::uint64_t after[3];
};

/// Every NaN that AdamW stores is this one. Which of two NaN operands an instruction hands on
/// depends on their order, which compilers may swap, and the sign of a new one on the architecture:
/// without one fixed NaN, targets would differ.
inline constexpr std::uint32_t kNaNBits = 0x7fc00000u;

/// Sums of squares: element i of a block goes to lane i % kSumLanes, whatever the width of a
/// register.
inline constexpr std::size_t kSumLanes = 16;
inline constexpr std::size_t kSumBlock = 4096;

namespace scalar {
void adamw(const AdamWStep& step, const AdamWSlice& slice);
void round_to_bf16(const float* values, bf16* out, std::size_t count);
/// Rounds, and adds the squares of the rounded values to lanes[kSumLanes]. `out` may begin where
/// `values` does.
void round_and_square(const float* values, bf16* out, std::size_t count, float* lanes);
}  // namespace scalar

void adamw(const AdamWStep& step, const AdamWSlice& slice);
/// adamw over one tile (kTileElements), and its hashes; those before only if `verify`.
void adamw_hashed(const AdamWStep& step, const AdamWSlice& tile, bool verify, TileHashes& hashes);
/// The same in three passes: hash64, adamw, hash64. For narrow registers, and for a tile of more
/// than one decay factor.
template <class Update>
void hash_around(const AdamWSlice& tile, bool verify, TileHashes& hashes, Update&& update) {
  const auto hash_all = [&](std::uint64_t(&out)[3]) {
    const float* const arrays[3] = {tile.master, tile.exp_avg, tile.exp_avg_sq};
    for (int i = 0; i < 3; ++i) out[i] = hash64(std::as_bytes(std::span(arrays[i], tile.count)), 0);
  };
  if (verify) hash_all(hashes.before);
  update();
  hash_all(hashes.after);
}
void round_to_bf16(const float* values, bf16* out, std::size_t count);
void round_and_square(const float* values, bf16* out, std::size_t count, float* lanes);

}  // namespace ziggurat::internal
