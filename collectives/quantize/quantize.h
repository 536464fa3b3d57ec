// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize.h: encodes parameters and gradients in 8 or 4 bits while they are
// sent between ranks, in blocks of 256 elements with one scale each (Wang et al. 2023, "ZeRO++",
// sections 4.1 and 4.3).
//
// A block depends on no other block, so any thread may send or encode any run of whole blocks:
//
//   scale, fp32: the block's largest magnitude L      4 bytes
//   codes, 8 bits: element j in byte j                q = 127
//   codes, 4 bits: element j in the lower half of byte j, element h + j in its upper half, plus 8,
//                  for h = half the block, rounded up q = 7
//
// A code is x / L * q rounded to nearest, ties to even, and represents code / q * L. The error of
// an element is at most (L / q) * (1/2 + 2^-12), which is 0.40 % of L in 8 bits and 7.2 % in 4; the
// rounding to a 16-bit type adds to it. L itself and zero are decoded exactly.
//
// A block with a value that is not finite is decoded as NaN, all of it; a block whose largest
// magnitude is denormal, as zero. Pointers need no alignment. The bits are the same on every
// instruction set; the plain C++ in quantize_rules.h and quantize.cc is the specification.
#pragma once

#include <cstddef>
#include <span>

#include "base/typed_span.h"
#include "collectives/quantize/quantized_block.h"

namespace ziggurat {

/// Encodes `values` as blocks; `blocks` is quantized_bytes() long. They do not overlap.
void quantize(QuantizedBits bits, TypedSpan<const std::byte> values,
              std::span<std::byte> blocks) noexcept;
/// Decodes `blocks`, rounded to the type of `values` as parameters are (optimizer/gradient.h).
void dequantize(QuantizedBits bits, std::span<const std::byte> blocks,
                TypedSpan<std::byte> values) noexcept;
/// Adds element i of `blocks` to sums[i], in fp32. The owner of a slice does this for each rank in
/// turn.
void add_dequantized(QuantizedBits bits, std::span<const std::byte> blocks,
                     std::span<float> sums) noexcept;

}  // namespace ziggurat
