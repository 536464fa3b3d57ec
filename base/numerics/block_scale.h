// SPDX-License-Identifier: Apache-2.0
// base/numerics/block_scale.h: the scale of a block of values that are stored or sent in few bits.
#pragma once

#include <bit>
#include <cstdint>

#include "base/numerics/rounding.h"

namespace ziggurat::internal {

/// Returns a magnitude as bits, which are in the order of the magnitudes, with NaN above infinity.
constexpr std::uint32_t magnitude_bits(float value) noexcept {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

/// A block's scale, made from its largest magnitude (as bits: NaN is above infinity). A value times
/// `inverse` lies in [-1, 1]. `inverse` is 0 if every value gets the code of zero.
struct BlockScale {
  float scale, inverse;
};
constexpr BlockScale block_scale(std::uint32_t largest_bits) noexcept {
  constexpr std::uint32_t kInfinityBits = 0x7f800000u;
  constexpr std::uint32_t kSmallestNormalBits = 0x00800000u;
  float scale = std::bit_cast<float>(largest_bits);
  if (largest_bits >= kInfinityBits) scale = quiet(scale - scale);
  if (largest_bits < kSmallestNormalBits) scale = 0.0f;
  return {scale, scale > 0.0f ? 1.0f / scale : 0.0f};
}

}  // namespace ziggurat::internal
