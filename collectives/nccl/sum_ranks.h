// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/sum_ranks.h: what ranks sent, added on the device in rank order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "base/dtype.h"

namespace ziggurat {

/// One row from each rank, in the device's memory.
struct RankRows {
  const std::byte* first = nullptr;
  std::size_t stride_bytes = 0;
  std::size_t ranks = 0;
};

/// As sum_in_rank_order (collectives/rank_sum.h): in fp32, rounded once, the same bits. Shapes:
/// each row and `sum` have `count` elements of `dtype`; `sum` is device memory and no row. Ordered
/// on `stream`. It reads `ranks` elements and writes one for each of `count`. Errors: kUnavailable.
void sum_ranks(cudaStream_t stream, const RankRows& rows, DType dtype, std::size_t count,
               std::byte* sum);

}  // namespace ziggurat
