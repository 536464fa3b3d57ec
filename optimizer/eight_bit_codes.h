// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit_codes.h: the specification of the 8-bit codes, one element at a time: the
// values as published, and the code of a value by a table over the upper half of a float.
//
// The compilers make the tables, so that a CUDA kernel has them in its own memory without an
// upload: 13 KB per code, which stay in the L1 cache.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/numerics/block_scale.h"
#include "base/numerics/host_device.h"
#include "optimizer/eight_bit.h"

namespace ziggurat::internal {

inline constexpr std::uint32_t kSignedZero = 127;  ///< the place of 0 among the signed codes
inline constexpr int kEightBitDecades = 7;

/// Calls `take(value)` for the values between 0 and 1, ascending. Decade i has 2^i of them (signed)
/// or twice as many: the middles of an even division of [0.1, 1], times 10^(i - 6). Each value is
/// rounded to fp32 where PyTorch's tensors round it.
template <class Take>
constexpr void for_each_fraction(EightBitCode code, const Take& take) {
  constexpr float kLeast = 0.1f;
  constexpr float kPowers[kEightBitDecades] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  for (int decade = 0; decade < kEightBitDecades; ++decade) {
    const int count = (code == EightBitCode::kSigned ? 1 : 2) << decade;
    const float step = (1.0f - kLeast) / static_cast<float>(count);
    // Exact in double, rounded once; PyTorch's linspace counts from the nearer end.
    const auto boundary = [&](int j) {
      const double wide = step;
      return static_cast<float>(j < (count + 1) / 2 ? static_cast<double>(kLeast) + wide * j
                                                    : 1.0 - wide * (count - j));
    };
    for (int j = 0; j < count; ++j)
      take(kPowers[decade] * ((boundary(j) + boundary(j + 1)) / 2.0f));
  }
}

/// Ascending.
using EightBitValues = std::array<float, 256>;
constexpr EightBitValues make_eight_bit_values(EightBitCode code) {
  EightBitValues values{};
  std::size_t count = 0;
  values[count++] = 0.0f;
  values[count++] = 1.0f;
  for_each_fraction(code, [&](float value) {
    values[count++] = value;
    if (code == EightBitCode::kSigned) values[count++] = -value;
  });
  if (count != values.size()) throw "a code of another number of values";  // does not compile
  std::sort(values.begin(), values.end());
  return values;
}

/// The thresholds between each magnitude and the next, from zero up: the largest float that is
/// nearer to the lower one or equally near.
struct EightBitThresholds {
  std::array<float, 255> values{};
  std::size_t count = 0;
};
constexpr EightBitThresholds make_eight_bit_thresholds(EightBitCode code) {
  const EightBitValues values = make_eight_bit_values(code);
  EightBitThresholds thresholds;
  const std::size_t zero = code == EightBitCode::kSigned ? kSignedZero : 0;
  for (std::size_t i = zero; i + 1 < values.size(); ++i) {
    const double middle = (static_cast<double>(values[i]) + static_cast<double>(values[i + 1])) / 2;
    auto below = static_cast<float>(middle);
    if (static_cast<double>(below) > middle)
      below = std::bit_cast<float>(std::bit_cast<std::uint32_t>(below) - 1);
    thresholds.values[thresholds.count++] = below;
  }
  return thresholds;
}

/// Counts the thresholds below a magnitude in [0, 1], which is its rank among the codes from zero
/// up. Floats with the same upper half are so close together that at most one threshold lies among
/// them. So an entry has the rank of the smallest, and the lower half above which the rank is one
/// more.
class EightBitRanks {
 public:
  constexpr explicit EightBitRanks(const EightBitThresholds& thresholds) : entries_{} {
    std::uint32_t rank = 0;
    std::size_t filled = 0;
    for (std::size_t i = 0; i < thresholds.count; ++i, ++rank) {
      const auto bits = std::bit_cast<std::uint32_t>(thresholds.values[i]);
      const std::size_t entry = (bits >> 16) - kFirst;
      if (filled > entry) throw "two thresholds in an entry";  // does not compile
      for (; filled < entry; ++filled) entries_[filled] = kNever | rank;
      entries_[filled++] = (bits & 0xffffu) << 16 | rank;
    }
    for (; filled < kEntries; ++filled) entries_[filled] = kNever | rank;
  }

  constexpr std::uint32_t of(std::uint32_t magnitude_bits) const noexcept {
    std::uint32_t upper = magnitude_bits >> 16;
    if (upper < kFirst) upper = kFirst;
    if (upper > kLast) upper = kLast;
    const std::uint32_t entry = entries_[upper - kFirst];
    return (entry & 0xffffu) + ((magnitude_bits & 0xffffu) > (entry >> 16) ? 1u : 0u);
  }

 private:
  static constexpr std::uint32_t kNever = 0xffff0000u;
  static constexpr std::uint32_t kFirst = (127u - 23u) << 7;  // 2^-23, which is below the first
                                                              // middle
  static constexpr std::uint32_t kLast = 127u << 7;           // 1, and values that rounding puts
                                                              // above it
  static constexpr std::size_t kEntries = kLast - kFirst + 1;
  std::array<std::uint32_t, kEntries> entries_;
};

struct EightBitCodes {
  EightBitValues values;
  EightBitRanks ranks;
};
constexpr EightBitCodes make_eight_bit_codes(EightBitCode code) {
  return {make_eight_bit_values(code), EightBitRanks(make_eight_bit_thresholds(code))};
}

/// Returns the tables in memory that the caller can read: the device's in a kernel, otherwise the
/// host's.
ZIGGURAT_HOST_DEVICE inline const EightBitCodes& eight_bit_codes(EightBitCode code) noexcept {
  static constexpr EightBitCodes kSigned = make_eight_bit_codes(EightBitCode::kSigned);
  static constexpr EightBitCodes kUnsigned = make_eight_bit_codes(EightBitCode::kUnsigned);
  return code == EightBitCode::kSigned ? kSigned : kUnsigned;
}

constexpr std::uint8_t signed_code(const EightBitRanks& ranks, float value,
                                   float inverse) noexcept {
  const std::uint32_t rank = ranks.of(magnitude_bits(value * inverse));
  const std::uint32_t negative = std::bit_cast<std::uint32_t>(value) >> 31;
  const std::uint32_t most = kSignedZero + 1 - negative;  // -1 has no code
  const std::uint32_t limited = rank < most ? rank : most;
  // Adds or subtracts the rank without a branch, because signs are as good as random.
  return static_cast<std::uint8_t>(kSignedZero + ((limited ^ (0u - negative)) + negative));
}

constexpr std::uint8_t unsigned_code(const EightBitRanks& ranks, float value,
                                     float inverse) noexcept {
  if (!(value > 0.0f)) return 0;
  const std::uint32_t rank = ranks.of(magnitude_bits(value * inverse));
  return static_cast<std::uint8_t>(rank > 1u ? rank : 1u);
}

/// Returns the code of a value's share of its block's largest magnitude; `inverse` is BlockScale's.
constexpr std::uint8_t code_of(const EightBitCodes& codes, EightBitCode code, float value,
                               float inverse) noexcept {
  return code == EightBitCode::kSigned ? signed_code(codes.ranks, value, inverse)
                                       : unsigned_code(codes.ranks, value, inverse);
}

}  // namespace ziggurat::internal
