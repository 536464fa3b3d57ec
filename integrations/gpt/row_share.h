// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/row_share.h: which rows of a micro-batch a rank keeps between layers.
//
// A row is a position of a sequence; sequences follow one another. With sequence parallelism
// (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
// section 4.2.2) each tensor-parallel rank keeps an equal run of consecutive rows of all values
// between the divided layers: norms, residual stream, embedding's sum. Norms work row by row, so
// runs need not end where sequences do.
//
//   2 sequences of 6 on 4 ranks:   rank 1 has rows 3 to 5, the second half of the first sequence
#pragma once

#include <cstdint>

namespace ziggurat::gpt {

struct RowShare {
  std::int64_t all = 0;    ///< rows of the micro-batch
  std::int64_t own = 0;    ///< rows of this rank: all of them without sequence parallelism
  std::int64_t first = 0;  ///< where this rank's rows begin

  static constexpr RowShare whole(std::int64_t rows) noexcept { return {rows, rows, 0}; }
  /// Returns run `rank` of `rows`, which `ranks` ranks divide.
  static constexpr RowShare of(std::int64_t rows, int rank, int ranks) noexcept {
    return {rows, rows / ranks, rows / ranks * rank};
  }
};

}  // namespace ziggurat::gpt
