// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizers.cc: the names of the table's rows.
#include "optimizer/optimizers.h"

#include <array>

namespace ziggurat {
namespace {

constexpr auto kNames = [] {
  std::array<std::string_view, kOptimizerCount> names;
  for (std::size_t i = 0; i < names.size(); ++i)
    names[i] = info_of(static_cast<OptimizerKind>(i)).name;
  return names;
}();

}  // namespace

std::string_view to_string(OptimizerKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

std::span<const std::string_view> optimizer_names() noexcept { return kNames; }

std::vector<std::string_view> optimizers_that(bool OptimizerInfo::*have) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kOptimizerCount; ++i) {
    if (info_of(static_cast<OptimizerKind>(i)).*have) names.push_back(kNames[i]);
  }
  return names;
}

std::optional<OptimizerKind> parse_optimizer(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<OptimizerKind>(i);
  }
  return std::nullopt;
}

}  // namespace ziggurat
