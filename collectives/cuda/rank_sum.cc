// SPDX-License-Identifier: Apache-2.0
// collectives/cuda/rank_sum.cc: checks addresses before anything is queued.
#include "collectives/cuda/rank_sum.h"

#include "base/check.h"
#include "collectives/cuda/rank_sum_programs.h"

namespace ziggurat::cuda {

void sum_ranks(StreamHandle stream, const RankRows& rows, DType dtype, std::size_t count,
               std::byte* sum) {
  ZIGGURAT_CHECK(rows.ranks > 0, "a sum of {} ranks", rows.ranks);
  require_aligned("contribution", rows.first, size_bytes(dtype));
  if (rows.ranks > 1)
    require_aligned("contribution of rank 1", rows.first + rows.stride_bytes, size_bytes(dtype));
  require_aligned("sum", sum, size_bytes(dtype));
  launch(SumRanks{rows.first, rows.stride_bytes, rows.ranks, dtype, count, sum}, stream);
}

}  // namespace ziggurat::cuda
