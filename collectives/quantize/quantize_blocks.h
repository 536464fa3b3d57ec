// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize_blocks.h: the seam between quantize.cc's walk over blocks and the
// instructions that do a block.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "collectives/quantize/quantize.h"

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
inline float load_scale(const std::byte* block) noexcept {
  float scale;
  std::memcpy(&scale, block, sizeof(scale));
  return scale;
}

namespace scalar {
/// One block, `count` elements of it; then `count` whole blocks, one behind the other.
void quantize_block(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                    std::byte* block);
void dequantize_block(QuantizedBits bits, const std::byte* block, std::size_t count, DType dtype,
                      std::byte* values);
void add_block(QuantizedBits bits, const std::byte* block, std::size_t count, float* sums);
void quantize_blocks(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                     std::byte* blocks);
void dequantize_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                       std::byte* values);
void add_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums);
}  // namespace scalar

/// `count` whole blocks.
void quantize_blocks(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                     std::byte* blocks);
void dequantize_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                       std::byte* values);
void add_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums);

}  // namespace ziggurat::internal
