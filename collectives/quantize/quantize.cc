// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize.cc: the specification of 8- and 4-bit blocks, one element after the
// other, and the walk over blocks.
#include "collectives/quantize/quantize.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/numerics/block_scale.h"
#include "base/numerics/typed_value.h"
#include "collectives/quantize/quantize_blocks.h"

namespace ziggurat {
namespace internal {
namespace {

std::uint32_t magnitude_bits(float value) noexcept {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

/// Nearest, ties to even: the sum's last mantissa bit is worth 1.
std::int32_t nearest(float value) noexcept {
  return std::bit_cast<std::int32_t>(value + kIntegerShift) - kIntegerShiftBits;
}

std::int32_t code_at(QuantizedBits bits, const std::byte* codes, std::size_t i,
                     std::size_t half) noexcept {
  if (bits == QuantizedBits::k8) return static_cast<std::int8_t>(codes[i]);
  const auto both = static_cast<std::int32_t>(codes[i < half ? i : i - half]);
  return (i < half ? both & 15 : both >> 4) - 8;
}

/// `take(i, value)` for each element of a block.
template <class Take>
void decode_block(QuantizedBits bits, const std::byte* block, std::size_t count,
                  const Take& take) noexcept {
  const float scale = load_scale(block);
  const float part = quantized_part(bits);
  const std::byte* codes = block + sizeof(float);
  const std::size_t half = (count + 1) / 2;
  for (std::size_t i = 0; i < count; ++i)
    take(i, static_cast<float>(code_at(bits, codes, i, half)) * part * scale);
}

}  // namespace

namespace scalar {

void quantize_block(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                    std::byte* block) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i)
    largest = std::max(largest, magnitude_bits(value_at(dtype, values, i)));
  const BlockScale scale = block_scale(largest);
  std::memcpy(block, &scale.scale, sizeof(float));
  std::byte* codes = block + sizeof(float);
  const float most = quantized_most(bits);
  // Where no element has a code but zero's, infinities and NaNs are not looked at.
  const auto code = [&](std::size_t i) -> std::int32_t {
    if (scale.inverse == 0.0f) return 0;
    return nearest(value_at(dtype, values, i) * scale.inverse * most);
  };
  if (bits == QuantizedBits::k8) {
    for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<std::byte>(code(i));
    return;
  }
  const std::size_t half = (count + 1) / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const std::int32_t upper = half + i < count ? code(half + i) : 0;
    codes[i] = static_cast<std::byte>((code(i) + 8) | (upper + 8) << 4);
  }
}

void dequantize_block(QuantizedBits bits, const std::byte* block, std::size_t count, DType dtype,
                      std::byte* values) {
  decode_block(bits, block, count,
               [&](std::size_t i, float value) { store_value(dtype, values, i, value); });
}

void add_block(QuantizedBits bits, const std::byte* block, std::size_t count, float* sums) {
  decode_block(bits, block, count, [&](std::size_t i, float value) {
    const float sum = sums[i] + value;
    // Which of two NaNs an addition hands on is the compiler's choice.
    sums[i] = quiet(sum);
  });
}

void quantize_blocks(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                     std::byte* blocks) {
  for (std::size_t b = 0; b < count; ++b) {
    quantize_block(bits, dtype, values + b * kQuantizedBlock * size_bytes(dtype), kQuantizedBlock,
                   blocks + b * quantized_bytes(bits, kQuantizedBlock));
  }
}

void dequantize_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                       std::byte* values) {
  for (std::size_t b = 0; b < count; ++b) {
    dequantize_block(bits, blocks + b * quantized_bytes(bits, kQuantizedBlock), kQuantizedBlock,
                     dtype, values + b * kQuantizedBlock * size_bytes(dtype));
  }
}

void add_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums) {
  for (std::size_t b = 0; b < count; ++b) {
    add_block(bits, blocks + b * quantized_bytes(bits, kQuantizedBlock), kQuantizedBlock,
              sums + b * kQuantizedBlock);
  }
}

}  // namespace scalar
}  // namespace internal

namespace {

/// `visit(first element, elements, bytes of blocks before it)`: all whole blocks, then the rest.
template <class Visit>
void each_part(QuantizedBits bits, std::size_t count, const Visit& visit) noexcept {
  const std::size_t whole = count / kQuantizedBlock * kQuantizedBlock;
  if (whole > 0) visit(0, whole, 0);
  if (count > whole) visit(whole, count - whole, quantized_bytes(bits, whole));
}

void require_size(QuantizedBits bits, std::size_t size_bytes, std::size_t count) noexcept {
  ZIGGURAT_CHECK(size_bytes == quantized_bytes(bits, count), "{} bytes for {} elements of {} bits",
                 size_bytes, count, static_cast<int>(bits));
}

}  // namespace

void quantize(QuantizedBits bits, TypedSpan<const std::byte> values,
              std::span<std::byte> blocks) noexcept {
  require_size(bits, blocks.size(), values.count());
  each_part(bits, values.count(), [&](std::size_t first, std::size_t count, std::size_t at) {
    const std::byte* from = values.bytes.data() + first * size_bytes(values.dtype);
    if (count < kQuantizedBlock)
      internal::scalar::quantize_block(bits, values.dtype, from, count, blocks.data() + at);
    else
      internal::quantize_blocks(bits, values.dtype, from, count / kQuantizedBlock, blocks.data());
  });
}

void dequantize(QuantizedBits bits, std::span<const std::byte> blocks,
                TypedSpan<std::byte> values) noexcept {
  require_size(bits, blocks.size(), values.count());
  each_part(bits, values.count(), [&](std::size_t first, std::size_t count, std::size_t at) {
    std::byte* to = values.bytes.data() + first * size_bytes(values.dtype);
    if (count < kQuantizedBlock)
      internal::scalar::dequantize_block(bits, blocks.data() + at, count, values.dtype, to);
    else
      internal::dequantize_blocks(bits, blocks.data(), count / kQuantizedBlock, values.dtype, to);
  });
}

void add_dequantized(QuantizedBits bits, std::span<const std::byte> blocks,
                     std::span<float> sums) noexcept {
  require_size(bits, blocks.size(), sums.size());
  each_part(bits, sums.size(), [&](std::size_t first, std::size_t count, std::size_t at) {
    if (count < kQuantizedBlock)
      internal::scalar::add_block(bits, blocks.data() + at, count, sums.data() + first);
    else
      internal::add_blocks(bits, blocks.data(), count / kQuantizedBlock, sums.data());
  });
}

}  // namespace ziggurat
