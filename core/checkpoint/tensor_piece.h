// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_piece.h: what somebody has of a whole tensor, however it was cut: a slice,
// a shard, all of it. Arithmetic only; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/checkpoint/state_source.h"
#include "core/checkpoint/tensor_box.h"

namespace ziggurat {

struct TensorPiece {
  std::string name;                 ///< of the whole; empty: the part is of none
  std::vector<std::int64_t> shape;  ///< of the whole
  std::vector<TensorBox> boxes;     ///< one after the other, each row by row, they are the part

  std::uint64_t count() const noexcept;
  bool is_whole() const { return boxes.size() == 1 && boxes[0] == whole_box(shape); }
};

/// Elements of a part, counted in it, as runs of the whole, in order; all of them are in the part.
std::vector<TensorRun> whole_runs(const TensorPiece& part, const TensorRun& run);

}  // namespace ziggurat
