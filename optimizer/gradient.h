// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient.h: what happens to a gradient on its way to the host: rounded once to 16 bits,
// its square summed in passing.
//
// Same rules as adamw.h: scalar specification, every SIMD target gives its bits. Sums: 16 virtual
// lanes in fp32 inside a block of 4,096 elements, a fixed tree over the lanes, blocks added in
// double in order; so a tile's sum depends on its values only.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace ziggurat {

/// Rounds `accumulator` to bf16 into `out`, which may begin at the same address, and returns the
/// sum of squares of the rounded values (NaN or inf in, NaN or inf out). Call it per tile
/// (kTileElements), so that sums do not depend on chunk sizes.
double round_gradient(std::span<const float> accumulator, std::span<bf16> out) noexcept;

/// Widest-ISA bf16 rounding of any count; for making 16-bit parameters from masters.
void round_to_bf16(std::span<const float> values, std::span<bf16> out) noexcept;

/// torch.nn.utils.clip_grad_norm_'s coefficient: min(1, clip_norm / (norm + 1e-6)); 1 when
/// clip_norm is 0.
float clip_coefficient(double norm, float clip_norm) noexcept;

}  // namespace ziggurat
