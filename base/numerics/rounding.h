// SPDX-License-Identifier: Apache-2.0
// base/numerics/rounding.h: specifies how fp32 becomes bf16 with noise, and the one NaN that is
// stored, as plain functions of one element.
#pragma once

#include <bit>
#include <cstdint>

#include "base/dtype.h"

namespace ziggurat {

/// The NaN that every update, sum of ranks and dequantizer stores. Which of two NaN operands an
/// instruction returns depends on their order, which compilers may swap, and the sign of a new NaN
/// depends on the architecture. Without one fixed NaN, targets would differ.
inline constexpr std::uint32_t kNaNBits = 0x7fc00000u;

constexpr float quiet(float value) noexcept {
  return value != value ? std::bit_cast<float>(kNaNBits) : value;
}

/// Returns the upper half of value + noise. Noise of 0x8000 rounds to nearest, ties away
/// (float_to_bf16). Uniform noise in [0, 2^16) rounds up with a probability equal to the part cut
/// off. NaN must be quiet().
inline constexpr std::uint32_t kNearestNoise = 0x8000u;
constexpr bf16 round_with_noise(float value, std::uint32_t noise) noexcept {
  return static_cast<bf16>((std::bit_cast<std::uint32_t>(value) + noise) >> 16);
}

}  // namespace ziggurat
