// SPDX-License-Identifier: Apache-2.0
// core/sharding/param_groups.cc: reads and writes groups as text, and finds the group of each
// parameter.
#include "core/sharding/param_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"

namespace ziggurat {
namespace {

void check(const ParamGroup& group) {
  const auto require = [&](bool good, std::string_view name, float value, std::string_view what) {
    if (good) return;
    throw Error(ErrorCode::kInvalidArgument, fmt::format("parameter group '{}' has {} {:g}: {}",
                                                         group.params, name, value, what));
  };
  const auto not_negative = [&](std::string_view name, float value) {
    require(value >= 0 && std::isfinite(value), name, value,
            "the value must be finite and at least 0");
  };
  const auto below_one = [&](std::string_view name, std::optional<float> value) {
    if (value)
      require(*value >= 0 && *value < 1, name, *value,
              "the value must be at least 0 and less than 1");
  };
  not_negative("lr-scale", group.lr_scale);
  if (group.weight_decay) not_negative("weight-decay", *group.weight_decay);
  if (group.eps) not_negative("eps", *group.eps);
  below_one("beta1", group.beta1);
  below_one("beta2", group.beta2);
}

/// Returns the text before the next `separator`; what follows that stays in `rest`.
std::string_view take(std::string_view& rest, char separator) {
  const std::size_t at = rest.find(separator);
  const std::string_view word = rest.substr(0, at);
  rest = at == std::string_view::npos ? std::string_view{} : rest.substr(at + 1);
  return word;
}

std::optional<float> parse_float(std::string_view text) {
  float value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Reads "lr-scale=0.5" or "frozen" into `group`. Returns false if `entry` is not a setting.
bool read_entry(std::string_view entry, ParamGroup& group) {
  if (entry == "frozen" || entry == "frozen=true" || entry == "frozen=false") {
    group.frozen = entry != "frozen=false";
    return true;
  }
  const std::string_view key = take(entry, '=');
  const std::optional<float> value = parse_float(entry);
  if (!value) return false;
  if (key == "lr-scale")
    group.lr_scale = *value;
  else if (key == "weight-decay")
    group.weight_decay = value;
  else if (key == "beta1")
    group.beta1 = value;
  else if (key == "beta2")
    group.beta2 = value;
  else if (key == "eps")
    group.eps = value;
  else
    return false;
  return true;
}

ParamGroup parse_group(std::string_view text) {
  const std::string_view whole = text;
  ParamGroup group;
  group.params = take(text, ':');
  if (group.params.empty() || text.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("'{}' is not a parameter group: write PATTERN:KEY=VALUE[,KEY=VALUE..] or "
                    "PATTERN:frozen, with ';' between groups",
                    whole));
  }
  while (!text.empty()) {
    const std::string_view entry = take(text, ',');
    if (read_entry(entry, group)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' is not a setting of a parameter group: give lr-scale, "
                            "weight-decay, beta1, beta2 or eps with = and a number, or frozen",
                            entry));
  }
  return group;
}

}  // namespace

std::vector<ParamGroup> parse_param_groups(std::string_view text) {
  std::vector<ParamGroup> groups;
  while (!text.empty()) groups.push_back(parse_group(take(text, ';')));
  return groups;
}

std::string to_text(std::span<const ParamGroup> groups) {
  std::string text;
  for (const ParamGroup& group : groups) {
    std::string entries;
    const auto add = [&](std::string_view key, std::optional<float> value) {
      if (value) entries += fmt::format("{}{}={}", entries.empty() ? "" : ",", key, *value);
    };
    if (group.lr_scale != 1) add("lr-scale", group.lr_scale);
    add("weight-decay", group.weight_decay);
    add("beta1", group.beta1);
    add("beta2", group.beta2);
    add("eps", group.eps);
    if (group.frozen) entries += entries.empty() ? "frozen" : ",frozen";
    if (entries.empty()) add("lr-scale", 1);
    text += fmt::format("{}{}:{}", text.empty() ? "" : ";", group.params, entries);
  }
  return text;
}

bool matches(std::string_view pattern, std::string_view name) noexcept {
  // Matches greedily with one way back: to the last *, which then takes one character more.
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
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "parameter group '{}' gets no parameter of model '{}': a parameter goes to the first "
            "group whose pattern matches its name, and the first parameter's name is '{}'",
            groups[i].params, model.name, first));
  }
}

std::size_t group_count(const ModelSpec& model) {
  std::size_t count = 0;
  for (const UnitSpec& unit : model.units) {
    for (const ParamSpec& param : unit.params)
      count = std::max<std::size_t>(count, param.group + 1);
  }
  return count;
}

}  // namespace ziggurat
