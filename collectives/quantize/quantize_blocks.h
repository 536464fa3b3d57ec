// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize_blocks.h: the functions for single blocks, which quantize.cc's loop
// over blocks calls for each instruction set.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "collectives/quantize/quantize_rules.h"

namespace ziggurat::internal {

namespace scalar {
/// The specification: functions for one block of `count` elements, then for `count` whole blocks,
/// one behind the other.
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

/// The functions with SIMD, for `count` whole blocks.
void quantize_blocks(QuantizedBits bits, DType dtype, const std::byte* values, std::size_t count,
                     std::byte* blocks);
void dequantize_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, DType dtype,
                       std::byte* values);
void add_blocks(QuantizedBits bits, const std::byte* blocks, std::size_t count, float* sums);

}  // namespace ziggurat::internal
