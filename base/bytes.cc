// SPDX-License-Identifier: Apache-2.0
// base/bytes.cc: parses and formats sizes.
#include "base/bytes.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/error.h"

namespace ziggurat {
namespace {

struct SizeUnit {
  std::string_view name;
  double factor;
};

constexpr std::array<SizeUnit, 14> kUnits{{{"", 1},
                                           {"b", 1},
                                           {"k", 1024.0},
                                           {"kib", 1024.0},
                                           {"kb", 1e3},
                                           {"m", 1048576.0},
                                           {"mib", 1048576.0},
                                           {"mb", 1e6},
                                           {"g", 1073741824.0},
                                           {"gib", 1073741824.0},
                                           {"gb", 1e9},
                                           {"t", 1099511627776.0},
                                           {"tib", 1099511627776.0},
                                           {"tb", 1e12}}};

[[noreturn]] void reject(std::string_view text, std::string_view parameter) {
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: '{}' is not a size; write it like 160MiB, 1.5GiB or 2GB", parameter, text));
}

}  // namespace

void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) noexcept {
  if (!from.empty() && from.data() != to.data()) std::memmove(to.data(), from.data(), from.size());
}

std::uint64_t parse_size(std::string_view text, std::string_view parameter) {
  double number = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc{} || !std::isfinite(number) || number < 0) reject(text, parameter);
  std::string suffix;
  for (const char* c = end; c != text.data() + text.size(); ++c) {
    if (*c != ' ') suffix += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  for (const SizeUnit& unit : kUnits) {
    if (unit.name != suffix) continue;
    const double size = number * unit.factor;
    if (size >= 9.2e18) reject(text, parameter);
    return static_cast<std::uint64_t>(std::llround(size));
  }
  reject(text, parameter);
}

std::string format_bytes(std::uint64_t size_bytes) {
  if (size_bytes < kKiB) return fmt::format("{} B", size_bytes);
  const auto size = static_cast<double>(size_bytes);
  if (size_bytes < kMiB) return fmt::format("{:.1f} KiB", size / static_cast<double>(kKiB));
  if (size_bytes < kGiB) return fmt::format("{:.1f} MiB", size / static_cast<double>(kMiB));
  return fmt::format("{:.2f} GiB", size / static_cast<double>(kGiB));
}

std::string exact_bytes(std::uint64_t size_bytes) {
  constexpr std::array<std::string_view, 4> kBinary{"", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  while (unit + 1 < kBinary.size() && size_bytes != 0 && size_bytes % kKiB == 0) {
    size_bytes /= kKiB;
    ++unit;
  }
  return fmt::format("{}{}", size_bytes, kBinary[unit]);
}

}  // namespace ziggurat
