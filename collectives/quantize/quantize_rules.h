// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize_rules.h: the specification of 8- and 4-bit blocks, one element at a
// time: what CPUs' and CUDA's kernels are made of, or compared with.
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

/// 1.5 * 2^23: added to a number below 2^22, leaves its nearest integer in the mantissa.
inline constexpr float kIntegerShift = 12582912.0f;
inline constexpr std::int32_t kIntegerShiftBits = std::bit_cast<std::int32_t>(kIntegerShift);

/// The largest code.
constexpr float quantized_most(QuantizedBits bits) noexcept {
  return bits == QuantizedBits::k8 ? 127.0f : 7.0f;
}
/// What a code of 1 stands for, as a share of the scale. The largest code times it is 1, exactly,
/// so that the largest value comes back as it was and nothing overflows.
constexpr float quantized_part(QuantizedBits bits) noexcept { return 1.0f / quantized_most(bits); }
static_assert(127.0f * quantized_part(QuantizedBits::k8) == 1.0f);
static_assert(7.0f * quantized_part(QuantizedBits::k4) == 1.0f);

/// A block needs no alignment, not in a kernel either.
ZIGGURAT_HOST_DEVICE inline float load_scale(const std::byte* block) noexcept {
  float scale;
  std::memcpy(&scale, block, sizeof(scale));
  return scale;
}
ZIGGURAT_HOST_DEVICE inline void store_scale(std::byte* block, float scale) noexcept {
  std::memcpy(block, &scale, sizeof(scale));
}

/// Nearest, ties to even: the sum's last mantissa bit is worth 1.
constexpr std::int32_t nearest_integer(float value) noexcept {
  return std::bit_cast<std::int32_t>(value + kIntegerShift) - kIntegerShiftBits;
}

/// Where no element has a code but zero's, infinities and NaNs are not looked at.
constexpr std::int32_t quantized_code(QuantizedBits bits, BlockScale scale, float value) noexcept {
  if (scale.inverse == 0.0f) return 0;
  const float in_one = value * scale.inverse;
  return nearest_integer(in_one * quantized_most(bits));
}

/// Byte `j` of the codes of a block of `count` values.
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
/// How many of them there are.
constexpr std::size_t quantized_code_bytes(QuantizedBits bits, std::size_t count) noexcept {
  return bits == QuantizedBits::k8 ? count : (count + 1) / 2;
}

/// Element `i` of a block of `count`. Which NaN a product makes is the machine's choice.
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

/// Which of two NaNs an addition hands on is the compiler's choice.
constexpr float dequantized_sum(float sum, float value) noexcept { return quiet(sum + value); }

}  // namespace ziggurat::internal
