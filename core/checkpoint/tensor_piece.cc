// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_piece.cc: finds where a part's elements lie in the whole tensor.
#include "core/checkpoint/tensor_piece.h"

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/checksum.h"

namespace ziggurat {

std::uint64_t TensorPiece::count() const noexcept {
  std::uint64_t total = 0;
  for (const TensorBox& box : boxes) total += box.count();
  return total;
}

TensorPiece piece_at(const WholePlace& place, std::uint64_t count) {
  TensorPiece piece{.name = place.name, .shape = place.shape, .boxes = {}};
  if (place.name.empty()) return piece;
  if (place.is_box()) {
    piece.boxes.push_back({.offsets = place.offsets, .shape = place.box});
  } else {
    piece.boxes = boxes_of(place.shape, place.first, count);
  }
  return piece;
}

std::optional<std::uint64_t> run_begin(const TensorPiece& part) {
  const std::vector<TensorRun> runs =
      whole_runs(part, {.first = 0, .count = part.count(), .at = 0});
  if (runs.empty()) return std::nullopt;
  std::uint64_t end = runs.front().first;
  for (const TensorRun& run : runs) {
    if (run.first != end) return std::nullopt;
    end += run.count;
  }
  return runs.front().first;
}

std::uint64_t cover_number(const TensorPiece& part) {
  const auto number_of = [](std::uint64_t place) {
    return hash64(std::as_bytes(std::span(&place, 1)), 0);
  };
  std::uint64_t sum = 0;
  for (const TensorRun& run : whole_runs(part, {.first = 0, .count = part.count(), .at = 0}))
    sum += number_of(run.first) - number_of(run.first + run.count);
  return sum;
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
