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

namespace ziggurat {

using UnitId = std::uint32_t;

struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  bool decay = true;  ///< weight decay applies (matrices, by custom; not biases and norms)
  /// Whose settings a step uses: the trainer's own (StepOptions::groups), or by
  /// EngineConfig::param_groups, if it has any, the one that assign_groups() finds
  std::uint32_t group = 0;
  bool frozen = false;  ///< its group is, by EngineConfig::param_groups
  /// The store keeps it once, without optimizer state: it was frozen when the store was made
  bool constant = false;
  /// The dimension that tensor-parallel ranks divide among them; -1: each has all of it
  int tp_dim = -1;
  /// Parameters that are fused along it, each divided by itself: 3 where columns are q | k | v
  int tp_sections = 1;
  /// Where a trainer lends a slice: which element of the whole parameter is its first
  std::uint64_t first_element = 0;

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
  /// In place of ModelSpec::dtype, where parameters are in the trainer's memory (Tier::kTrainer).
  std::optional<DType> dtype = std::nullopt;

  std::uint64_t count() const {
    std::uint64_t total = 0;
    for (const ParamSpec& param : params) total += param.count();
    return total;
  }
  bool frozen() const { return std::ranges::all_of(params, &ParamSpec::frozen); }
  bool constant() const { return std::ranges::all_of(params, &ParamSpec::constant); }
};

struct ModelSpec {
  std::string name;
  std::vector<UnitSpec> units;
  /// The type of the parameters that a trainer is given, and of gradients on their way to the
  /// update; masters are fp32 whatever it is.
  DType dtype = DType::kBFloat16;

  std::uint64_t count() const {
    std::uint64_t total = 0;
    for (const UnitSpec& unit : units) total += unit.count();
    return total;
  }
};

}  // namespace ziggurat
