// SPDX-License-Identifier: Apache-2.0
// integrations/cli/group_options.cc: the text of --param-groups, read.
#include "integrations/cli/group_options.h"

#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat::cli {
namespace {

/// What stands before the next `separator`; `rest` goes on behind it.
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

/// "lr-scale=0.5" or "frozen" into `group`; false if it is no such thing.
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

}  // namespace

std::vector<ParamGroup> read_param_groups(const Settings& settings, ModelSpec model) {
  std::vector<ParamGroup> groups;
  std::string_view rest = settings.text("param-groups");
  while (!rest.empty()) {
    std::string_view entries = take(rest, ';');
    ParamGroup group;
    group.params = take(entries, ':');
    if (group.params.empty() || entries.empty()) {
      throw UsageError(fmt::format(
          "{}: a group is PATTERN:KEY=VALUE[,KEY=VALUE..] or PATTERN:frozen, groups have ';' "
          "between them",
          settings.described("param-groups")));
    }
    while (!entries.empty()) {
      const std::string_view entry = take(entries, ',');
      if (!read_entry(entry, group)) {
        throw UsageError(
            fmt::format("{}: '{}' is none of lr-scale, weight-decay, beta1, beta2 or "
                        "eps with = and a number, and not frozen",
                        settings.described("param-groups"), entry));
      }
    }
    groups.push_back(std::move(group));
  }
  try {
    assign_groups(model, groups);
  } catch (const Error& error) {
    throw UsageError(fmt::format("{}: {}", settings.described("param-groups"), error.what()));
  }
  return groups;
}

}  // namespace ziggurat::cli
