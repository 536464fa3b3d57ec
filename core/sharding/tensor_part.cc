// SPDX-License-Identifier: Apache-2.0
// core/sharding/tensor_part.cc: where a tensor-parallel part's elements lie in the whole parameter.
#include "core/sharding/tensor_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

std::uint64_t wide(std::int64_t value) noexcept { return static_cast<std::uint64_t>(value); }

ParamSpec part_of(ParamSpec param, int ranks) {
  if (param.tp_dim < 0) return param;
  std::int64_t& along = param.shape[static_cast<std::size_t>(param.tp_dim)];
  const std::int64_t parts = static_cast<std::int64_t>(param.tp_sections) * ranks;
  if (along % parts != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("`tp={}`: dimension {} of {} has {} elements{}, which {} ranks cannot divide "
                    "evenly, because {} would be left over: give another `tp`",
                    ranks, param.tp_dim, param.name, along,
                    param.tp_sections > 1 ? fmt::format(" in {} sections", param.tp_sections) : "",
                    ranks, along % parts));
  }
  along /= ranks;
  return param;
}

/// A divided parameter as its part lies in memory: `tp_sections` stretches for each index of the
/// dimensions before tp_dim.
struct Stretches {
  std::uint64_t length;  ///< elements of one stretch
  std::uint64_t ranks;
  std::uint64_t rank;

  Stretches(const ParamSpec& param, TensorPart part)
      : length(param.count()), ranks(wide(part.ranks)), rank(wide(part.rank)) {
    for (int d = 0; d < param.tp_dim; ++d) length /= wide(param.shape[static_cast<std::size_t>(d)]);
    length /= wide(param.tp_sections);
  }
  /// Returns where an element of the part lies in the whole, which has the stretches of all ranks
  /// in turn.
  std::uint64_t whole(std::uint64_t element) const noexcept {
    return (element / length * ranks + rank) * length + element % length;
  }
};

}  // namespace

UnitSpec part_of(const UnitSpec& whole, int ranks) {
  UnitSpec unit{.name = whole.name, .params = {}, .dtype = whole.dtype};
  for (const ParamSpec& param : whole.params) unit.params.push_back(part_of(param, ranks));
  return unit;
}

ModelSpec part_of(const ModelSpec& whole, int ranks) {
  ModelSpec model{.name = whole.name, .units = {}, .dtype = whole.dtype};
  for (const UnitSpec& unit : whole.units) model.units.push_back(part_of(unit, ranks));
  return model;
}

ModelSpec whole_of(const ModelSpec& part, int ranks) {
  ModelSpec model = part;
  for (UnitSpec& unit : model.units) {
    for (ParamSpec& param : unit.params) {
      if (param.tp_dim >= 0) param.shape[static_cast<std::size_t>(param.tp_dim)] *= ranks;
    }
  }
  return model;
}

std::vector<ElementRun> shared_runs(const UnitSpec& unit) {
  std::vector<ElementRun> runs;
  std::uint64_t begin = 0;
  for (const ParamSpec& param : unit.params) {
    const std::uint64_t end = begin + param.count();
    if (param.tp_dim < 0) {
      if (!runs.empty() && runs.back().end == begin) {
        runs.back().end = end;
      } else {
        runs.push_back({begin, end});
      }
    }
    begin = end;
  }
  return runs;
}

ParamPlace place_of(const ParamSpec& param, TensorPart part, std::uint64_t first) {
  ParamPlace place{.name = hash64(std::as_bytes(std::span(param.name)), 0),
                   .first = param.first_element + first};
  if (param.tp_dim < 0 || part.ranks == 1) return place;
  place.block = Stretches(param, part).length;
  place.rank = static_cast<std::uint32_t>(part.rank);
  place.ranks = static_cast<std::uint32_t>(part.ranks);
  return place;
}

void for_each_run(const UnitSpec& unit, TensorPart part, std::uint64_t first, std::uint64_t count,
                  const std::function<void(const PartRun&)>& body) {
  ZIGGURAT_CHECK(part.rank >= 0 && part.rank < part.ranks, "part {} of {}", part.rank, part.ranks);
  const std::uint64_t end = first + count;
  std::uint64_t param_begin = 0;
  std::uint64_t whole_param_begin = 0;
  for (const ParamSpec& param : unit.params) {
    const std::uint64_t param_end = param_begin + param.count();
    const bool divided = param.tp_dim >= 0;
    const Stretches stretches(param, part);
    for (std::uint64_t at = std::max(first, param_begin); at < std::min(end, param_end);) {
      const std::uint64_t element = at - param_begin;
      const std::uint64_t left = std::min(end, param_end) - at;
      const std::uint64_t run =
          divided ? std::min(left, stretches.length - element % stretches.length) : left;
      body({.begin = at,
            .whole_begin = whole_param_begin + (divided ? stretches.whole(element) : element),
            .count = run});
      at += run;
    }
    param_begin = param_end;
    whole_param_begin += param.count() * (divided ? wide(part.ranks) : 1);
  }
}

}  // namespace ziggurat
