// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/cuda/quantize.h: collectives/quantize/quantize.h on a GPU.
//
// The same blocks and the same bits. Every span is memory of the device; values and sums are
// aligned to their elements, blocks need no alignment. Kernels are queued on the caller's stream
// and nothing waits; memory must stay until they have run. Errors: kInvalidArgument for an address
// that is not aligned, kResourceExhausted and kUnavailable from the launch.
#pragma once

#include <cstddef>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "base/typed_span.h"
#include "collectives/quantize/quantized_block.h"

namespace ziggurat::cuda {

/// `values` into blocks; `blocks` is quantized_bytes() long. They do not overlap. 3.02 bytes an
/// element from 16 bits to 8, 2.52 to 4.
void quantize(StreamHandle stream, QuantizedBits bits, TypedSpan<const std::byte> values,
              std::span<std::byte> blocks);
/// The values of `blocks`, rounded to the type of `values` as parameters are. They do not overlap.
void dequantize(StreamHandle stream, QuantizedBits bits, std::span<const std::byte> blocks,
                TypedSpan<std::byte> values);
/// sums[i] += element i of `blocks`, in fp32: for each rank in turn, so that the order of additions
/// is that of the ranks. 9.02 bytes an element from 8 bits.
void add_dequantized(StreamHandle stream, QuantizedBits bits, std::span<const std::byte> blocks,
                     std::span<float> sums);

}  // namespace ziggurat::cuda
