// SPDX-License-Identifier: Apache-2.0
// core/sharding/param_groups.cc: from patterns to numbers.
#include "core/sharding/param_groups.h"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "base/error.h"

namespace ziggurat {
namespace {

void check(const ParamGroup& group) {
  const auto require = [&](bool good, std::string_view name, float value, std::string_view what) {
    if (good) return;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("parameter group '{}': {} {:g}: {}", group.params, name, value, what));
  };
  const auto not_negative = [&](std::string_view name, float value) {
    require(value >= 0 && std::isfinite(value), name, value, "it must be 0 or more, and finite");
  };
  const auto below_one = [&](std::string_view name, std::optional<float> value) {
    if (value)
      require(*value >= 0 && *value < 1, name, *value, "it must be at least 0 and less than 1");
  };
  not_negative("lr-scale", group.lr_scale);
  if (group.weight_decay) not_negative("weight-decay", *group.weight_decay);
  if (group.eps) not_negative("eps", *group.eps);
  below_one("beta1", group.beta1);
  below_one("beta2", group.beta2);
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) noexcept {
  // Greedy with one way back: to the last *, which then takes one character more.
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;
  std::size_t star_end = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_end = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++star_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

void assign_groups(ModelSpec& model, std::span<const ParamGroup> groups) {
  for (const ParamGroup& group : groups) check(group);
  std::vector<bool> used(groups.size(), false);
  std::string first;
  for (UnitSpec& unit : model.units) {
    for (ParamSpec& param : unit.params) {
      if (first.empty()) first = param.name;
      param.group = 0;
      param.frozen = param.constant = false;
      for (std::uint32_t i = 0; i < groups.size() && param.group == 0; ++i) {
        if (!matches(groups[i].params, param.name)) continue;
        param.group = i + 1;
        param.frozen = param.constant = groups[i].frozen;
        used[i] = true;
      }
    }
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (used[i]) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("parameter group '{}': no parameter of model '{}' falls to it (a "
                            "parameter goes to the first group that has its name; names are like "
                            "'{}')",
                            groups[i].params, model.name, first));
  }
}

}  // namespace ziggurat
