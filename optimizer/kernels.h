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

#include "base/dtype.h"
#include "base/numerics/block_scale.h"
#include "optimizer/eight_bit.h"
#include "optimizer/optimizer_step.h"
#include "optimizer/rounding.h"
#include "optimizer/state_format.h"

namespace ziggurat::internal {

inline constexpr std::size_t kMomentsMax = 2;

/// A part of a tile under one decay setting, its arrays apart. Pointers need only the alignment of
/// their elements.
struct Slice {
  StateFormat format;

  float* master;                    ///< kFp32, kBf16Moments, k8Bit
  const bf16* param_in;             ///< kSplit, kBf16: the parameter as it was,
  bf16* param_record;               ///< and where the record holds it
  std::uint16_t* residual;          ///< kSplit
  std::byte* moments[kMomentsMax];  ///< float; in kBf16Moments and kBf16 bf16, in k8Bit codes
  float* scales[kMomentsMax];       ///< k8Bit, whose slices are whole blocks: one a block

  DType grad_dtype;
  const std::byte* grad;
  DType param_dtype;
  std::byte* param;  ///< null: the record's is enough

  std::size_t count;
  float decay;            ///< OptimizerStep::decay or no_decay
  NoiseKey noise_key;     ///< of the tile
  std::uint32_t in_tile;  ///< the first element's place in its tile
};

constexpr std::size_t moment_bytes(StateFormat format) noexcept {
  if (format == StateFormat::k8Bit) return 1;
  return format == StateFormat::kBf16Moments || format == StateFormat::kBf16 ? 2 : 4;
}

/// How k8Bit keeps a moment: sums of squares have no sign.
constexpr EightBitCode moment_code(OptimizerKind kind, std::size_t moment) noexcept {
  const bool has_sign = moment == 0 && kind != OptimizerKind::kAdagrad;
  return has_sign ? EightBitCode::kSigned : EightBitCode::kUnsigned;
}

/// Elements [begin, end) of `slice`.
inline Slice part_of(const Slice& slice, std::size_t begin, std::size_t end) {
  Slice part = slice;
  if (slice.master != nullptr) part.master += begin;
  if (slice.param_in != nullptr) part.param_in += begin;
  if (slice.param_record != nullptr) part.param_record += begin;
  if (slice.residual != nullptr) part.residual += begin;
  for (std::byte*& moment : part.moments) {
    if (moment != nullptr) moment += begin * moment_bytes(slice.format);
  }
  for (float*& scales : part.scales) {
    if (scales != nullptr) scales += begin / kEightBitBlock;
  }
  part.grad += begin * size_bytes(slice.grad_dtype);
  if (slice.param != nullptr) part.param += begin * size_bytes(slice.param_dtype);
  part.count = end - begin;
  part.in_tile += static_cast<std::uint32_t>(begin);
  return part;
}

/// hash64 (seed 0) of a tile of master, exp_avg and exp_avg_sq, as it came and as it is left.
struct TileHashes {
  std::uint64_t before[3];  ///< unset where not asked for
  std::uint64_t after[3];
};

/// Sums of squares: element i of a block goes to lane i % kSumLanes, whatever the width of a
/// register.
inline constexpr std::size_t kSumLanes = 16;
inline constexpr std::size_t kSumBlock = 4096;

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
/// The code of one value.
std::uint8_t eight_bit_code(EightBitCode code, float value, float inverse) noexcept;
}  // namespace scalar

/// A kernel for each format, in the file of its name; `slice.format` says which.
void update_fp32(const OptimizerStep& step, const Slice& slice);
void update_bf16_moments(const OptimizerStep& step, const Slice& slice);
void update_split(const OptimizerStep& step, const Slice& slice);
void update_bf16(const OptimizerStep& step, const Slice& slice);
void update_eight_bit(const OptimizerStep& step, const Slice& slice);
/// The one for `slice.format`.
void update(const OptimizerStep& step, const Slice& slice);

/// Registers of any width store a parameter past the cache, if its address is a multiple of this.
inline constexpr std::size_t kStreamAlignment = 64;
/// Whether adamw_hashed can do a whole tile of this: AdamW in kFp32 from a bf16 gradient to an
/// aligned bf16 parameter rounded to nearest, on registers of 256 bits or more.
bool can_hash_adamw(const OptimizerStep& step, const Slice& tile);
/// update over one tile (kTileElements), and its hashes; those before only if `verify`.
void adamw_hashed(const OptimizerStep& step, const Slice& tile, bool verify, TileHashes& hashes);

void round_to_bf16(const float* values, bf16* out, std::size_t count);
void round_and_square(const float* values, DType dtype, std::byte* out, std::size_t count,
                      float* lanes);

}  // namespace ziggurat::internal
