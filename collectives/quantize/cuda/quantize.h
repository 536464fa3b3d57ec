// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/cuda/quantize.h: collectives/quantize/quantize.h on a GPU.
//
// It makes the same blocks with the same bits. Every span is memory of the device; values and sums
// are aligned to their elements, blocks need no alignment. Kernels are queued on the caller's
// stream, and the functions do not wait; memory must stay until the kernels have run. Errors:
// kInvalidArgument for an address that is not aligned, kResourceExhausted and kUnavailable from the
// launch.
#pragma once

#include <cstddef>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "base/typed_span.h"
#include "collectives/quantize/quantized_block.h"

namespace ziggurat::cuda {

/// Encodes `values` as blocks; `blocks` is quantized_bytes() long. They do not overlap. Moves 3.02
/// bytes per element from 16 bits to 8, and 2.52 to 4.
void quantize(StreamHandle stream, QuantizedBits bits, TypedSpan<const std::byte> values,
              std::span<std::byte> blocks);
/// Decodes `blocks`, rounded to the type of `values` as parameters are. They do not overlap.
void dequantize(StreamHandle stream, QuantizedBits bits, std::span<const std::byte> blocks,
                TypedSpan<std::byte> values);
/// Adds element i of `blocks` to sums[i], in fp32. Called for each rank in turn, so that additions
/// are in the order of ranks. Moves 9.02 bytes per element from 8 bits.
void add_dequantized(StreamHandle stream, QuantizedBits bits, std::span<const std::byte> blocks,
                     std::span<float> sums);

}  // namespace ziggurat::cuda
