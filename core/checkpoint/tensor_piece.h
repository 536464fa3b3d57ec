// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_piece.h: what a rank or a trainer has of a whole tensor, however it is
// divided: a slice, a shard, all of it. Arithmetic only; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/state_source.h"
#include "core/checkpoint/tensor_box.h"
#include "core/sharding/whole_place.h"

namespace ziggurat {

struct TensorPiece {
  std::string name;                 ///< of the whole tensor; empty if the part belongs to none
  std::vector<std::int64_t> shape;  ///< of the whole
  std::vector<TensorBox> boxes;     ///< one after the other they are the part, each row by row

  std::uint64_t count() const noexcept;
  bool is_whole() const { return boxes.size() == 1 && boxes[0] == whole_box(shape); }
};

/// Returns the part of `count` elements that lies at `place`, of which fault_of() finds no fault.
TensorPiece piece_at(const WholePlace& place, std::uint64_t count);

/// Returns the number of the part's first element in the whole, if the part's elements follow one
/// another there.
std::optional<std::uint64_t> run_begin(const TensorPiece& part);

/// Returns a number for where the part's runs begin and end in the whole tensor. Parts together
/// have each element equally often, n times, if their numbers add up to n times the whole's, modulo
/// 2^64; chance makes others do so with 2^-64.
std::uint64_t cover_number(const TensorPiece& part);

/// Returns elements of a part as runs of the whole tensor, in order. `run` counts in the part,
/// which has all of its elements.
std::vector<TensorRun> whole_runs(const TensorPiece& part, const TensorRun& run);

}  // namespace ziggurat
