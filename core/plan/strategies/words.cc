// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/words.cc: digits and separators.
#include "core/plan/strategies/words.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ziggurat {

std::string whole_gb(double bytes) {
  return bytes < 9.95e9 ? fmt::format("{:.1f} GB", bytes / 1e9)
                        : fmt::format("{:.0f} GB", bytes / 1e9);
}

std::string grouped(std::int64_t count) {
  if (count < 0) return "-" + grouped(-count);
  const std::string digits = std::to_string(count);
  std::string said;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) said += ',';
    said += digits[i];
  }
  return said;
}

std::string about(double count) {
  if (!(count > 0)) return "0";
  const double unit = std::pow(10.0, std::max(0.0, std::floor(std::log10(count)) - 1));
  return grouped(static_cast<std::int64_t>(std::llround(std::round(count / unit) * unit)));
}

}  // namespace ziggurat
