// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient.h: prepares a gradient for the host: rounds it once, and sums its squares in
// the same pass.
//
// The rules are those of update.h: a scalar specification, and every SIMD target gives its bits.
// Sums: 16 virtual lanes in fp32 inside a block of 4,096 elements, a fixed tree over the lanes, and
// blocks added in double in order. So a tile's sum depends on its values only.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/typed_span.h"

namespace ziggurat {

/// Rounds `accumulator` into `out` (bf16: nearest, ties away; fp16: nearest even, infinity from
/// 65,520 on; fp32: unchanged), which may begin at the same address. Returns the sum of squares of
/// what it wrote. The sum is not finite exactly if one of those values is not, so it is the
/// overflow check too. Call it per tile (kTileElements), so that sums do not depend on chunk sizes.
double round_gradient(std::span<const float> accumulator, TypedSpan<std::byte> out) noexcept;
inline double round_gradient(std::span<const float> accumulator, std::span<bf16> out) noexcept {
  return round_gradient(accumulator, as_typed(out));
}

/// Rounds any count to bf16, with the widest instructions of this CPU.
void round_to_bf16(std::span<const float> values, std::span<bf16> out) noexcept;

/// Makes parameters from masters, any count, as an update with rounding to nearest does.
void round_params(std::span<const float> masters, TypedSpan<std::byte> out) noexcept;

/// Adds value i * scale to sums[i], in fp32; every NaN stored is 0x7fc00000.
void accumulate_gradient(TypedSpan<const std::byte> values, float scale,
                         std::span<float> sums) noexcept;

/// Widens exactly; a NaN keeps its payload.
void widen(TypedSpan<const std::byte> values, std::span<float> out) noexcept;

/// Multiplies values[i] by factor, in fp32, and rounds once to the type of `values`. Returns
/// whether all results are finite: false means that a value overflowed, or was not finite before.
bool scale_gradient(TypedSpan<std::byte> values, float factor) noexcept;

/// Returns the coefficient of torch.nn.utils.clip_grad_norm_: min(1, clip_norm / (norm + 1e-6)); 1
/// if clip_norm is 0.
float clip_coefficient(double norm, float clip_norm) noexcept;

}  // namespace ziggurat
