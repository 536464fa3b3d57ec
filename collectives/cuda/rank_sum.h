// SPDX-License-Identifier: Apache-2.0
// collectives/cuda/rank_sum.h: collectives/rank_sum.h on a GPU: sums the contributions of ranks,
// which lie side by side in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/numerics/kernel_launch.h"

namespace ziggurat::cuda {

/// The contributions of ranks: rank r's begins r * stride_bytes after `first`.
struct RankRows {
  const std::byte* first;
  std::uint64_t stride_bytes;
  std::size_t ranks;
};

/// Queues a sum with the bits of sum_in_rank_order. Shapes: each row and `sum` have `count`
/// elements of `dtype`, aligned to them; `sum` may be one of the rows. The kernel runs on the
/// caller's stream, and this call does not wait. It moves (ranks + 1) * count elements. Errors:
/// kInvalidArgument for a row that is not aligned, kResourceExhausted and kUnavailable from the
/// launch.
void sum_ranks(StreamHandle stream, const RankRows& rows, DType dtype, std::size_t count,
               std::byte* sum);

}  // namespace ziggurat::cuda
