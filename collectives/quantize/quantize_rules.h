// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize_rules.h: the specification of 8- and 4-bit blocks, one element at a
// time. CUDA's kernels are made of it, and those for CPUs are compared with it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "base/numerics/block_scale.h"
#include "base/numerics/host_device.h"
#include "base/numerics/rounding.h"
#include "base/numerics/typed_value.h"
#include "collectives/quantize/quantized_block.h"

namespace ziggurat::internal {

/// 1.5 * 2^23. Added to a number below 2^22, it leaves the nearest integer in the mantissa.
inline constexpr float kIntegerShift = 12582912.0f;
inline constexpr std::int32_t kIntegerShiftBits = std::bit_cast<std::int32_t>(kIntegerShift);

/// The largest code.
constexpr float quantized_most(QuantizedBits bits) noexcept {
  return bits == QuantizedBits::k8 ? 127.0f : 7.0f;
}
/// Returns the value of a code of 1, as a share of the scale. The largest code times it is exactly
/// 1, so that the largest value is decoded exactly and nothing overflows.
constexpr float quantized_part(QuantizedBits bits) noexcept { return 1.0f / quantized_most(bits); }
static_assert(127.0f * quantized_part(QuantizedBits::k8) == 1.0f);
static_assert(7.0f * quantized_part(QuantizedBits::k4) == 1.0f);

/// Loads a block's scale. A block needs no alignment, not even in a kernel.
ZIGGURAT_HOST_DEVICE inline float load_scale(const std::byte* block) noexcept {
  float scale;
  std::memcpy(&scale, block, sizeof(scale));
  return scale;
}
ZIGGURAT_HOST_DEVICE inline void store_scale(std::byte* block, float scale) noexcept {
  std::memcpy(block, &scale, sizeof(scale));
}

/// Rounds to nearest, ties to even: the last mantissa bit of the sum has the value 1.
constexpr std::int32_t nearest_integer(float value) noexcept {
  return std::bit_cast<std::int32_t>(value + kIntegerShift) - kIntegerShiftBits;
}

/// Returns the code of a value. If the scale gives every element the code of zero, the value is not
/// looked at, not even if it is infinite or NaN.
constexpr std::int32_t quantized_code(QuantizedBits bits, BlockScale scale, float value) noexcept {
  if (scale.inverse == 0.0f) return 0;
  const float in_one = value * scale.inverse;
  return nearest_integer(in_one * quantized_most(bits));
}

/// Returns byte `j` of the codes of a block of `count` values.
ZIGGURAT_HOST_DEVICE inline std::byte quantized_byte(QuantizedBits bits, BlockScale scale,
                                                     DType dtype, const std::byte* values,
                                                     std::size_t count, std::size_t j) noexcept {
  const std::int32_t code = quantized_code(bits, scale, value_at(dtype, values, j));
  if (bits == QuantizedBits::k8) return static_cast<std::byte>(code);
  const std::size_t partner = (count + 1) / 2 + j;
  const std::int32_t upper =
      partner < count ? quantized_code(bits, scale, value_at(dtype, values, partner)) : 0;
  return static_cast<std::byte>((code + 8) | (upper + 8) << 4);
}
/// Returns the number of bytes of codes in a block of `count` values.
constexpr std::size_t quantized_code_bytes(QuantizedBits bits, std::size_t count) noexcept {
  return bits == QuantizedBits::k8 ? count : (count + 1) / 2;
}

/// Returns element `i` of a block of `count`. quiet() is needed because machines differ in the NaN
/// that a product makes.
ZIGGURAT_HOST_DEVICE inline float dequantized(QuantizedBits bits, const std::byte* block,
                                              std::size_t count, std::size_t i) noexcept {
  const std::byte* const codes = block + sizeof(float);
  const std::size_t half = (count + 1) / 2;
  std::int32_t code;
  if (bits == QuantizedBits::k8) {
    code = static_cast<std::int8_t>(codes[i]);
  } else {
    const auto both = static_cast<std::int32_t>(codes[i < half ? i : i - half]);
    code = (i < half ? both & 15 : both >> 4) - 8;
  }
  const float share = static_cast<float>(code) * quantized_part(bits);
  return quiet(share * load_scale(block));
}

/// Adds `value` to `sum`. quiet() is needed because compilers differ in which of two NaNs an
/// addition returns.
constexpr float dequantized_sum(float sum, float value) noexcept { return quiet(sum + value); }

}  // namespace ziggurat::internal
