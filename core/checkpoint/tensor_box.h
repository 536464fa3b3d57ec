// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_box.h: rectangular parts of tensors, which PyTorch's distributed
// checkpoint describes by offsets and sizes. Arithmetic only; any thread.
//
// Elements of a tensor, and those of a box, are counted in row-major order.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace ziggurat {

struct TensorBox {
  std::vector<std::int64_t> offsets;  ///< indices of its first element in the tensor
  std::vector<std::int64_t> shape;    ///< sizes, as many as offsets; none of them is 0

  std::uint64_t count() const noexcept;
  friend bool operator==(const TensorBox&, const TensorBox&) = default;
};
/// Returns the box that is all of a tensor of `shape`.
TensorBox whole_box(std::span<const std::int64_t> shape);

/// Returns elements [first, first + count) of a tensor of `shape` as boxes, in order: a tensor
/// of d dimensions needs at most 2 d - 1 boxes.
///
///   shape 4 x 5, elements 3 to 16:  row 0, columns 3-4 | rows 1-2, whole | row 3, columns 0-1
std::vector<TensorBox> boxes_of(std::span<const std::int64_t> shape, std::uint64_t first,
                                std::uint64_t count);

/// Returns what two boxes of one tensor have in common.
std::optional<TensorBox> common(const TensorBox& a, const TensorBox& b);

/// Calls `body(in a, in b, count)` for each run of elements that follow one another in both boxes,
/// in order, with as few runs as possible.
void for_each_common_run(
    const TensorBox& a, const TensorBox& b,
    const std::function<void(std::uint64_t in_a, std::uint64_t in_b, std::uint64_t count)>& body);

}  // namespace ziggurat
