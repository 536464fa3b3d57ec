// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_piece.cc: finds where a part's elements lie in the whole tensor.
#include "core/checkpoint/tensor_piece.h"

#include <algorithm>

namespace ziggurat {

std::uint64_t TensorPiece::count() const noexcept {
  std::uint64_t total = 0;
  for (const TensorBox& box : boxes) total += box.count();
  return total;
}

std::vector<TensorRun> whole_runs(const TensorPiece& part, const TensorRun& run) {
  std::vector<TensorRun> runs;
  const TensorBox whole = whole_box(part.shape);
  std::uint64_t begin = 0;  // first element of the box, counted in the part
  for (const TensorBox& box : part.boxes) {
    const std::uint64_t end = begin + box.count();
    const std::uint64_t from = std::max(begin, run.first);
    const std::uint64_t to = std::min(end, run.first + run.count);
    if (from < to) {
      std::uint64_t at = run.at + (from - run.first);
      for (TensorBox inner : boxes_of(box.shape, from - begin, to - from)) {
        for (std::size_t d = 0; d < inner.offsets.size(); ++d) inner.offsets[d] += box.offsets[d];
        for_each_common_run(
            inner, whole, [&](std::uint64_t in_box, std::uint64_t in_whole, std::uint64_t count) {
              runs.push_back({.first = in_whole, .count = count, .at = at + in_box});
            });
        at += inner.count();
      }
    }
    begin = end;
  }
  return runs;
}

}  // namespace ziggurat
