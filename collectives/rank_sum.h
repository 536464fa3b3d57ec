// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum.h: the sum of ranks' contributions: element by element in rank order, in
// fp32, rounded once. The same bits on every target.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace ziggurat {

/// Shapes: each contribution and `sum` have `count` elements of `dtype`; `sum` may be one of the
/// contributions. Rounding: bf16 nearest, ties away; fp16 nearest, ties to even. Every NaN becomes
/// one.
void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t count, std::byte* sum);

namespace scalar {
/// The specification.
void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t first, std::size_t count, std::byte* sum);
}  // namespace scalar

}  // namespace ziggurat
