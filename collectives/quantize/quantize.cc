// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize.cc: the specification of 8- and 4-bit blocks, one element after the
// other, and the loop over blocks.
#include "collectives/quantize/quantize.h"

#include <algorithm>

#include "base/check.h"
#include "collectives/quantize/quantize_blocks.h"
#include "collectives/quantize/quantize_rules.h"

namespace ziggurat {
namespace internal {
namespace scalar {

void quantize_block(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                    std::byte* block) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i)
    largest = std::max(largest, magnitude_bits(value_at(dtype, values, i)));
  const BlockScale scale = block_scale(largest);
  store_scale(block, scale.scale);
  std::byte* codes = block + sizeof(float);
  for (std::size_t j = 0; j < quantized_code_bytes(bits, count); ++j)
    codes[j] = quantized_byte(bits, scale, dtype, values, count, j);
}

void dequantize_block(QuantizedBits bits, const std::byte* block, std::size_t count, DType dtype,
                      std::byte* values) {
  for (std::size_t i = 0; i < count; ++i)
    store_value(dtype, values, i, dequantized(bits, block, count, i));
}

void add_block(QuantizedBits bits, const std::byte* block, std::size_t count, float* sums) {
  for (std::size_t i = 0; i < count; ++i)
    sums[i] = dequantized_sum(sums[i], dequantized(bits, block, count, i));
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

/// Calls `visit(first element, elements, bytes of blocks before it)` for all whole blocks, then for
/// the rest.
template <class Visit>
void each_part(QuantizedBits bits, std::size_t count, const Visit& visit) noexcept {
  const std::size_t whole = count / kQuantizedBlock * kQuantizedBlock;
  if (whole > 0) visit(0, whole, 0);
  if (count > whole) visit(whole, count - whole, quantized_bytes(bits, whole));
}

void require_size(QuantizedBits bits, std::size_t size_bytes, std::size_t count) noexcept {
  ZIGGURAT_CHECK(size_bytes == quantized_bytes(bits, count),
                 "{} bytes do not hold exactly {} elements of {} bits", size_bytes, count,
                 static_cast<int>(bits));
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
