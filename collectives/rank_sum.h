// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum.h: sums the contributions of ranks, element by element in rank order, with
// the same bits on every target.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "collectives/call.h"

namespace ziggurat {

/// Sums in fp32 and rounds once. Shapes: each contribution and `sum` have `count` elements of
/// `dtype`; `sum` may be one of the contributions. Rounding: bf16 nearest, ties away; fp16 nearest,
/// ties to even. Every NaN becomes the one of base/numerics/rounding.h.
void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t count, std::byte* sum);

/// Combines doubles or integers by `spec.op`, for kAllReduceValues. Shapes: each contribution and
/// `result` have `spec.count` elements; `result` may be one of the contributions.
void combine_in_rank_order(std::span<const std::byte* const> contributions, const CallSpec& spec,
                           std::byte* result);

namespace scalar {
/// The specification, which kernels are compared with.
void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t first, std::size_t count, std::byte* sum);
}  // namespace scalar

}  // namespace ziggurat
