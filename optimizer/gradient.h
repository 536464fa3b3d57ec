// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient.h: what happens to a gradient on its way to the host: rounded once, its
// square summed in passing.
//
// Same rules as update.h: scalar specification, every SIMD target gives its bits. Sums: 16 virtual
// lanes in fp32 inside a block of 4,096 elements, a fixed tree over the lanes, blocks added in
// double in order; so a tile's sum depends on its values only.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/typed_span.h"

namespace ziggurat {

/// Rounds `accumulator` into `out` (bf16: nearest, ties away; fp16: nearest even, infinity from
/// 65,520 on; fp32: as it is), which may begin at the same address, and returns the sum of squares
/// of what it wrote: not finite exactly where one of those values is not, so it is the overflow
/// check too. Call it per tile (kTileElements), so that sums do not depend on chunk sizes.
double round_gradient(std::span<const float> accumulator, TypedSpan<std::byte> out) noexcept;
inline double round_gradient(std::span<const float> accumulator, std::span<bf16> out) noexcept {
  return round_gradient(accumulator, as_typed(out));
}

/// Widest-ISA bf16 rounding of any count.
void round_to_bf16(std::span<const float> values, std::span<bf16> out) noexcept;

/// Parameters from masters, any count, as an update rounds them to nearest.
void round_params(std::span<const float> masters, TypedSpan<std::byte> out) noexcept;

/// sums[i] += value i * scale, in fp32; every NaN stored is 0x7fc00000.
void accumulate_gradient(TypedSpan<const std::byte> values, float scale,
                         std::span<float> sums) noexcept;

/// Exactly; a NaN keeps its payload.
void widen(TypedSpan<const std::byte> values, std::span<float> out) noexcept;

/// values[i] *= factor, in fp32, rounded once to the type of `values`. Returns whether all that was
/// written is finite: false is an overflow, or one that came so.
bool scale_gradient(TypedSpan<std::byte> values, float factor) noexcept;

/// torch.nn.utils.clip_grad_norm_'s coefficient: min(1, clip_norm / (norm + 1e-6)); 1 when
/// clip_norm is 0.
float clip_coefficient(double norm, float clip_norm) noexcept;

}  // namespace ziggurat
