// SPDX-License-Identifier: Apache-2.0
// optimizer/kernels.h: separates what is computed from the instructions that compute it.
//
// Each operation exists as the specification (namespace scalar: plain C++, one element after the
// other) and as a Highway kernel for every target. The function outside these namespaces chooses by
// simd_target.h. All of them give the same bits for any input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/numerics/block_scale.h"
#include "optimizer/eight_bit.h"
#include "optimizer/optimizer_step.h"
#include "optimizer/slice.h"
#include "optimizer/square_sum.h"

namespace ziggurat::internal {

/// The hash64 (seed 0) of a tile's master, exp_avg and exp_avg_sq, before and after the update.
struct TileHashes {
  std::uint64_t before[3];  ///< not set unless asked for
  std::uint64_t after[3];
};

namespace scalar {
void update(const OptimizerStep& step, const Slice& slice);
void round_to_bf16(const float* values, bf16* out, std::size_t count);
/// Rounds to `dtype`, and adds the squares of the rounded values to lanes[kSumLanes]. `out` may
/// begin where `values` does.
void round_and_square(const float* values, DType dtype, std::byte* out, std::size_t count,
                      float* lanes);
void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values);
void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales);
/// Returns the code of one value.
std::uint8_t eight_bit_code(EightBitCode code, float value, float inverse) noexcept;
}  // namespace scalar

/// For the formats without codes (formats_simd.cc), and with them (eight_bit_simd.cc).
void update_elements(const OptimizerStep& step, const Slice& slice);
void update_codes(const OptimizerStep& step, const Slice& slice);
/// Calls the kernel for `slice.format`.
void update(const OptimizerStep& step, const Slice& slice);

/// The alignment of an address at which registers of any width can store a parameter past the
/// cache.
inline constexpr std::size_t kStreamAlignment = 64;
/// Returns whether adamw_hashed can do a whole tile of this kind: AdamW in kFp32, a bf16 gradient,
/// an aligned bf16 parameter rounded to nearest, and registers of 256 bits or more.
bool can_hash_adamw(const OptimizerStep& step, const Slice& tile);
/// Updates one tile (kTileElements) and takes its hashes; those before the update only if `verify`.
void adamw_hashed(const OptimizerStep& step, const Slice& tile, bool verify, TileHashes& hashes);

void round_to_bf16(const float* values, bf16* out, std::size_t count);
void round_and_square(const float* values, DType dtype, std::byte* out, std::size_t count,
                      float* lanes);

}  // namespace ziggurat::internal
