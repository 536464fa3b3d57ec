// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum_rule.h: the specification of one element of a sum of ranks. CUDA's kernels
// are made of it, and those for CPUs are compared with it.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/numerics/host_device.h"
#include "base/numerics/rounding.h"
#include "base/numerics/typed_value.h"

namespace ziggurat::internal {

/// Stores in `sum` element `i` of the sum of `ranks` contributions of `dtype`, added in rank order
/// and rounded once. `row(r)` is where rank r's contribution begins.
template <class Row>
ZIGGURAT_HOST_DEVICE inline void sum_ranks_at(std::size_t ranks, const Row& row, DType dtype,
                                              std::size_t i, std::byte* sum) {
  float total = value_at(dtype, row(0), i);
  for (std::size_t r = 1; r < ranks; ++r) total = total + value_at(dtype, row(r), i);
  store_value(dtype, sum, i, quiet(total));
}

}  // namespace ziggurat::internal
