// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_box.cc: cuts, intersects and walks boxes.
#include "core/checkpoint/tensor_box.h"

#include <algorithm>

#include "base/check.h"

namespace ziggurat {
namespace {

std::uint64_t wide(std::int64_t value) noexcept { return static_cast<std::uint64_t>(value); }

/// Returns for each dimension how many elements lie below one of its indices.
std::vector<std::uint64_t> strides_of(std::span<const std::int64_t> shape) {
  std::vector<std::uint64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * wide(shape[d]);
  return strides;
}

/// Cuts elements [first, end) of dimensions `d` and up into boxes. `at` has the indices of the
/// dimensions before `d`.
void cut(std::span<const std::int64_t> shape, std::span<const std::uint64_t> strides, std::size_t d,
         std::uint64_t first, std::uint64_t end, TensorBox& at, std::vector<TensorBox>& boxes) {
  if (first == end) return;
  if (d == shape.size()) return boxes.push_back(at);
  const std::uint64_t stride = strides[d];
  const auto inside = [&](std::uint64_t index, std::uint64_t from, std::uint64_t to) {
    at.offsets[d] = static_cast<std::int64_t>(index);
    at.shape[d] = 1;
    cut(shape, strides, d + 1, from, to, at, boxes);
  };
  std::uint64_t begin_row = first / stride;
  const std::uint64_t end_row = end / stride;
  if (begin_row == end_row) return inside(begin_row, first % stride, end % stride);
  if (first % stride != 0) inside(begin_row++, first % stride, stride);
  if (begin_row < end_row) {
    TensorBox rows = at;
    rows.offsets[d] = static_cast<std::int64_t>(begin_row);
    rows.shape[d] = static_cast<std::int64_t>(end_row - begin_row);
    for (std::size_t k = d + 1; k < shape.size(); ++k) {
      rows.offsets[k] = 0;
      rows.shape[k] = shape[k];
    }
    boxes.push_back(std::move(rows));
  }
  if (end % stride != 0) inside(end_row, 0, end % stride);
}

}  // namespace

std::uint64_t TensorBox::count() const noexcept {
  std::uint64_t total = 1;
  for (const std::int64_t dimension : shape) total *= wide(dimension);
  return total;
}

TensorBox whole_box(std::span<const std::int64_t> shape) {
  return {.offsets = std::vector<std::int64_t>(shape.size(), 0),
          .shape = {shape.begin(), shape.end()}};
}

std::vector<TensorBox> boxes_of(std::span<const std::int64_t> shape, std::uint64_t first,
                                std::uint64_t count) {
  std::vector<TensorBox> boxes;
  TensorBox at = whole_box(shape);
  ZIGGURAT_CHECK(first + count <= at.count(), "elements {} to {} of {}", first, first + count,
                 at.count());
  cut(shape, strides_of(shape), 0, first, first + count, at, boxes);
  return boxes;
}

std::optional<TensorBox> common(const TensorBox& a, const TensorBox& b) {
  ZIGGURAT_CHECK(a.shape.size() == b.shape.size(), "boxes of {} and {} dimensions", a.shape.size(),
                 b.shape.size());
  TensorBox both = a;
  for (std::size_t d = 0; d < a.shape.size(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.shape[d], b.offsets[d] + b.shape[d]);
    if (begin >= end) return std::nullopt;
    both.offsets[d] = begin;
    both.shape[d] = end - begin;
  }
  return both;
}

void for_each_common_run(
    const TensorBox& a, const TensorBox& b,
    const std::function<void(std::uint64_t, std::uint64_t, std::uint64_t)>& body) {
  const std::optional<TensorBox> found = common(a, b);
  if (!found) return;
  const TensorBox& both = *found;
  const std::size_t rank = both.shape.size();
  const std::vector<std::uint64_t> in_a = strides_of(a.shape);
  const std::vector<std::uint64_t> in_b = strides_of(b.shape);
  // Dimensions from `inner` on make one run: all but the outermost of these are whole in both
  // boxes.
  std::size_t inner = rank;
  std::uint64_t run = 1;
  while (inner > 0) {
    --inner;
    run *= wide(both.shape[inner]);
    if (both.shape[inner] != a.shape[inner] || both.shape[inner] != b.shape[inner]) break;
  }
  std::vector<std::int64_t> index(both.offsets);
  for (;;) {
    std::uint64_t at_a = 0;
    std::uint64_t at_b = 0;
    for (std::size_t d = 0; d < rank; ++d) {
      at_a += wide(index[d] - a.offsets[d]) * in_a[d];
      at_b += wide(index[d] - b.offsets[d]) * in_b[d];
    }
    body(at_a, at_b, run);
    std::size_t d = inner;
    while (d > 0) {
      --d;
      if (++index[d] < both.offsets[d] + both.shape[d]) break;
      index[d] = both.offsets[d];
      if (d == 0) return;
    }
    if (inner == 0) return;
  }
}

}  // namespace ziggurat
