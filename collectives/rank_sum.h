// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum.h: what ranks' contributions add up to: element by element in rank order.
// The same bits on every target.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "collectives/call.h"

namespace ziggurat {

/// In fp32, rounded once. Shapes: each contribution and `sum` have `count` elements of `dtype`;
/// `sum` may be one of the contributions. Rounding: bf16 nearest, ties away; fp16 nearest, ties to
/// even. Every NaN becomes one.
void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t count, std::byte* sum);

/// kAllReduceValues: doubles or integers, by `spec.op`. Shapes: each contribution and `result` have
/// `spec.count` elements; `result` may be one of the contributions.
void combine_in_rank_order(std::span<const std::byte* const> contributions, const CallSpec& spec,
                           std::byte* result);

namespace scalar {
/// The specification.
void sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                       std::size_t first, std::size_t count, std::byte* sum);
}  // namespace scalar

}  // namespace ziggurat
