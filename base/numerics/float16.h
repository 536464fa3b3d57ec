// SPDX-License-Identifier: Apache-2.0
// base/numerics/float16.h: converts between fp32 and IEEE binary16 by integer arithmetic, with the
// same bits on every machine.
#pragma once

#include <bit>
#include <cstdint>

namespace ziggurat {

/// An IEEE binary16 value.
using fp16 = std::uint16_t;

/// Converts exactly. Denormals are made by a subtraction of two normal numbers, so that
/// flush-to-zero settings do not change them.
constexpr float fp16_to_float(fp16 value) noexcept {
  const std::uint32_t magnitude = value & 0x7fffu;
  const std::uint32_t sign = (value & 0x8000u) << 16;
  constexpr std::uint32_t kRebias = (127u - 15u) << 23;
  std::uint32_t bits = (magnitude << 13) + kRebias;
  if (magnitude >= 0x7c00u) bits += kRebias;  // infinity and NaN
  if (magnitude < 0x0400u)
    bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits + (1u << 23)) - 0x1p-14f);
  return std::bit_cast<float>(bits | sign);
}

/// Rounds to nearest, ties to even; from 65,520 on to infinity. Every NaN becomes 0x7e00.
constexpr fp16 float_to_fp16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<fp16>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude >= (143u << 23)) return static_cast<fp16>(sign | 0x7c00u);
  if (magnitude < (113u << 23)) {
    // For a denormal: the last place of 0.5 in fp32 is the last place of binary16's denormals, so
    // the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<fp16>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  const std::uint32_t rounded = magnitude - (112u << 23) + 0xfffu + odd;
  return static_cast<fp16>(sign | (rounded >> 13));
}

}  // namespace ziggurat
