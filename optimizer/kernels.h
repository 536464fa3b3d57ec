// SPDX-License-Identifier: Apache-2.0
// optimizer/kernels.h: the seam between what is computed and with which instructions.
//
// Each operation exists as the specification (namespace scalar: plain C++, one element after the
// other) and as a Highway kernel for every target; the function outside picks by simd_target.h. All
// of them give the same bits for any input.
#pragma once

#include <cstddef>

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
void round_to_bf16(const float* values, bf16* out, std::size_t count);
void round_and_square(const float* values, bf16* out, std::size_t count, float* lanes);

}  // namespace ziggurat::internal
