// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/load_options.cc: rules of names.
#include "core/checkpoint/load_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {

std::optional<std::string> LoadRename::of(std::string_view name) const {
  const std::size_t star = from.find('*');
  if (star == std::string::npos) return name == from ? std::optional(to) : std::nullopt;
  const std::string_view before = std::string_view(from).substr(0, star);
  const std::string_view after = std::string_view(from).substr(star + 1);
  if (name.size() < before.size() + after.size() || !name.starts_with(before) ||
      !name.ends_with(after))
    return std::nullopt;
  std::string renamed = to;
  renamed.replace(renamed.find('*'), 1,
                  name.substr(before.size(), name.size() - before.size() - after.size()));
  return renamed;
}

std::vector<LoadRename> parse_load_renames(std::string_view text) {
  std::vector<LoadRename> renames;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(';'), text.size());
    const std::string_view rule = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::size_t equals = rule.find('=');
    const std::string_view from = rule.substr(0, equals);
    const std::string_view to =
        equals == std::string_view::npos ? std::string_view() : rule.substr(equals + 1);
    const auto stars = std::ranges::count(from, '*');
    if (from.empty() || to.empty() || to.find('=') != std::string_view::npos || stars > 1 ||
        stars != std::ranges::count(to, '*')) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is not a rule: give OLD=NEW, with one * on both sides or on "
                              "neither, and ';' between rules",
                              rule));
    }
    renames.push_back({.from = std::string(from), .to = std::string(to)});
  }
  return renames;
}

std::string to_text(std::span<const LoadRename> renames) {
  std::string text;
  for (const LoadRename& rename : renames)
    text += fmt::format("{}{}={}", text.empty() ? "" : ";", rename.from, rename.to);
  return text;
}

}  // namespace ziggurat
