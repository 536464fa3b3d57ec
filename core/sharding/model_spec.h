// SPDX-License-Identifier: Apache-2.0
// core/sharding/model_spec.h: what a trainer tells the engine about its model: units of named
// parameters, in forward order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "core/sharding/whole_place.h"

namespace ziggurat {

using UnitId = std::uint32_t;
/// Number of a parameter in the list of a trainer that lends its parameters.
using ParamId = std::uint32_t;

struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  bool decay = true;  ///< weight decay applies (by custom to matrices, not to biases and norms)
  /// Says whose settings a step uses. The trainer's own numbers name StepOptions::groups; if
  /// EngineConfig::param_groups has any groups, assign_groups() sets the number instead.
  std::uint32_t group = 0;
  /// Its group in EngineConfig::param_groups is frozen. A trainer that lends sets this for a
  /// streamed parameter that it never trains.
  bool frozen = false;
  /// True if the parameter was frozen when the store was made: the store keeps it once, without
  /// optimizer state.
  bool constant = false;
  /// Dimension that tensor-parallel ranks divide among them; -1 if each rank has the whole
  /// parameter.
  int tp_dim = -1;
  /// Number of parameters that are fused along tp_dim, each divided by itself: 3 where columns are
  /// q | k | v.
  int tp_sections = 1;
  /// Number of a slice's first element in the whole parameter, if a trainer lends slices.
  std::uint64_t first_element = 0;
  /// Set if a trainer lends the parameter, or at least its gradient.
  std::optional<ParamId> lent = std::nullopt;
  /// Set if the engine keeps such a parameter and brings it to the trainer: the number of the unit
  /// with which the trainer acquires it.
  std::optional<std::uint32_t> streamed = std::nullopt;
  /// Which part of which tensor the parameter is, if a trainer lends it and says so. A place
  /// without a name says that it belongs to no tensor.
  std::optional<WholePlace> whole = std::nullopt;

  /// Whether the store has the parameter. A frozen one of a trainer that lends is at home alone:
  /// the trainer, who has it from somewhere, gives it to each engine anew.
  bool stored() const noexcept { return !lent || !frozen; }
  std::uint64_t count() const {
    return std::accumulate(
        shape.begin(), shape.end(), std::uint64_t{1},
        [](std::uint64_t n, std::int64_t d) { return n * static_cast<std::uint64_t>(d); });
  }
};

/// Parameters that are acquired and released together, stored flat in this order (FSDP's
/// communication unit).
struct UnitSpec {
  std::string name;
  std::vector<ParamSpec> params;
  /// The type of the unit's parameters, in place of ModelSpec::dtype.
  std::optional<DType> dtype = std::nullopt;
  /// A step may leave the unit without a gradient, as a router does with an expert. The unit is
  /// then left alone: no decay, and the step is not counted in GroupStep::steps. Among several
  /// ranks a unit that has a gradient on any rank has one on all, with zeros from the others.
  bool optional = false;
  /// The unit's records are in 8 bits, and each parameter has blocks of codes of its own
  /// (packing.h). Otherwise parameters follow one another without gaps.
  bool own_blocks = false;

  /// Elements of its parameters; gaps between them do not count.
  std::uint64_t count() const {
    std::uint64_t total = 0;
    for (const ParamSpec& param : params) total += param.count();
    return total;
  }
  bool frozen() const { return std::ranges::all_of(params, &ParamSpec::frozen); }
  bool constant() const { return std::ranges::all_of(params, &ParamSpec::constant); }
  /// Parameters of a unit are stored, or none is.
  bool stored() const { return std::ranges::all_of(params, &ParamSpec::stored); }
};

struct ModelSpec {
  std::string name;
  std::vector<UnitSpec> units;
  /// The type of the parameters that a trainer is given, and of gradients on their way to the
  /// update, unless a unit has its own. Masters are fp32 in every case.
  DType dtype = DType::kBFloat16;

  std::uint64_t count() const {
    std::uint64_t total = 0;
    for (const UnitSpec& unit : units) total += unit.count();
    return total;
  }
  /// Whether the parameters of every unit are in bf16.
  bool is_bf16() const {
    return std::ranges::all_of(units, [&](const UnitSpec& unit) {
      return unit.dtype.value_or(dtype) == DType::kBFloat16;
    });
  }
};

}  // namespace ziggurat
