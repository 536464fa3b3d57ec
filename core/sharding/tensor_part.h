// SPDX-License-Identifier: Apache-2.0
// core/sharding/tensor_part.h: which elements of a model a tensor-parallel rank has, and where they
// lie in the whole model.
//
// A parameter with ParamSpec::tp_dim is divided along that dimension into equal parts, in the order
// of ranks. If it fuses several parameters (c_attn's columns are q | k | v), each of its
// ParamSpec::tp_sections is divided in this way. Every rank has all other parameters whole.
//
//   width 4, 2 ranks, q | k | v:    rank 0 has columns  0 1 | 4 5 |  8  9
//                                   rank 1              2 3 | 6 7 | 10 11
//
// Arithmetic only; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/sharding/model_spec.h"
#include "optimizer/rounding.h"

namespace ziggurat {

/// Which one of the `ranks` that divide every layer a rank is.
struct TensorPart {
  int rank = 0;
  int ranks = 1;

  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

/// Returns the part that each of `ranks` has of a model: shapes are the part's, everything else is
/// the whole model's. Errors: kInvalidArgument, with the arithmetic, for a dimension that cannot be
/// divided evenly.
ModelSpec part_of(const ModelSpec& whole, int ranks);
UnitSpec part_of(const UnitSpec& whole, int ranks);
/// Returns the whole model of which each of `ranks` has a part: the reverse of part_of().
ModelSpec whole_of(const ModelSpec& part, int ranks);

/// Elements [begin, end) of a unit's flat parameters.
struct ElementRun {
  std::uint64_t begin, end;
  std::uint64_t count() const noexcept { return end - begin; }
};
/// Returns where element `first` of a part's parameter, and those after it, lie in the whole
/// parameter: the place that keys noise. `param` has the part's shape.
ParamPlace place_of(const ParamSpec& param, TensorPart part, std::uint64_t first);

/// Returns the runs of a part's unit that are not divided, in order; every rank has them.
std::vector<ElementRun> shared_runs(const UnitSpec& unit);

/// Elements that follow one another both in a part's unit and in the whole unit.
struct PartRun {
  std::uint64_t begin;        ///< first element in the part's flat parameters
  std::uint64_t whole_begin;  ///< first element in the whole unit's flat parameters
  std::uint64_t count;
};
/// Calls `body` for each run of elements [first, first + count) of a part's unit, in order. `unit`
/// has the part's shapes.
void for_each_run(const UnitSpec& unit, TensorPart part, std::uint64_t first, std::uint64_t count,
                  const std::function<void(const PartRun&)>& body);

}  // namespace ziggurat
