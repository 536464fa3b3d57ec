// SPDX-License-Identifier: Apache-2.0
// core/sharding/tensor_part.h: which elements of a model a tensor-parallel rank has, and where they
// lie in the whole.
//
// A parameter with ParamSpec::tp_dim is divided along that dimension into equal parts, in the order
// of ranks; one that fuses several (c_attn's columns are q | k | v) has each of its
// ParamSpec::tp_sections divided so. The others every rank has whole.
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

/// One of `ranks` that divide every layer among them.
struct TensorPart {
  int rank = 0;
  int ranks = 1;

  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

/// What each of `ranks` has of a model; shapes are the part's, everything else the whole's.
/// Errors: kInvalidArgument, with the arithmetic, for a dimension that does not divide.
ModelSpec part_of(const ModelSpec& whole, int ranks);
UnitSpec part_of(const UnitSpec& whole, int ranks);
/// The other way: the whole of what each of `ranks` has a part of.
ModelSpec whole_of(const ModelSpec& part, int ranks);

/// Elements [begin, end) of a unit's flat parameters.
struct ElementRun {
  std::uint64_t begin, end;
  std::uint64_t count() const noexcept { return end - begin; }
};
/// Where element `first` of `part`'s parameter, and what follows it, is in the whole one: what
/// noise is keyed by. `param` has the part's shape.
ParamPlace place_of(const ParamSpec& param, TensorPart part, std::uint64_t first);

/// What of a part's unit is not divided: every rank has it; in order.
std::vector<ElementRun> shared_runs(const UnitSpec& unit);

/// Elements that follow one another in a part's unit and in the whole one.
struct PartRun {
  std::uint64_t begin;        ///< in the part's flat parameters
  std::uint64_t whole_begin;  ///< in the whole unit's
  std::uint64_t count;
};
/// The runs of elements [first, first + count) of `part`'s unit, in their order. `unit` has the
/// part's shapes.
void for_each_run(const UnitSpec& unit, TensorPart part, std::uint64_t first, std::uint64_t count,
                  const std::function<void(const PartRun&)>& body);

}  // namespace ziggurat
