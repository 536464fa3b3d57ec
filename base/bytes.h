// SPDX-License-Identifier: Apache-2.0
// base/bytes.h: copies bytes, and reads and writes their sizes as people write them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ziggurat {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kGiB = 1024 * kMiB;

/// Rounds up to a multiple of `alignment` (any positive number).
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

/// Copies bytes to memory that has room for them, which may overlap them or be the same.
/// (std::ranges::copy of GCC 12 takes constant bytes one by one, at a quarter of the speed.)
void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) noexcept;

/// Reads "160MiB", "1.5GiB", "384M" (binary, like MiB), "2GB" (decimal) or plain bytes.
/// Errors: kInvalidArgument, naming `parameter`, for anything else, for negative sizes and for
/// overflow.
std::uint64_t parse_size(std::string_view text, std::string_view parameter);

/// Formats a size for people: "164.1 MiB", or whole bytes below 1 KiB.
std::string format_bytes(std::uint64_t size_bytes);

/// Formats a size exactly: "160MiB". parse_size() reads it as the same number.
std::string exact_bytes(std::uint64_t size_bytes);

}  // namespace ziggurat
