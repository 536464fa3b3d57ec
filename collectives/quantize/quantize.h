// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantize.h: parameters and gradients in 8 or 4 bits on their way between
// ranks: blocks of 256 elements, each with its own scale (Wang et al. 2023, "ZeRO++", sections 4.1
// and 4.3).
//
// A block stands by itself, so any run of whole blocks may be sent or encoded alone, by any thread:
//
//   scale, fp32: the block's largest magnitude L      4 bytes
//   codes, 8 bits: element j in byte j                q = 127
//   codes, 4 bits: element j in the lower half of byte j, element h + j in its upper half, plus 8,
//                  for h = half the block, rounded up q = 7
//
// A code is x / L * q rounded to nearest, ties to even, and stands for code / q * L. The error of
// an element is at most (L / q) * (1/2 + 2^-12), so 0.40 % of L in 8 bits and 7.2 % in 4; to that
// the rounding to a 16-bit type is added. L itself and zero come back as they were.
//
// A block with a value that is not finite comes back as NaN, all of it; one whose largest magnitude
// is denormal, as zero. Pointers need no alignment. The same bits on every instruction set; the
// plain C++ in quantize_rules.h and quantize.cc is the specification.
#pragma once

#include <cstddef>
#include <span>

#include "base/typed_span.h"
#include "collectives/quantize/quantized_block.h"

namespace ziggurat {

/// `values` into blocks; `blocks` is quantized_bytes() long. They do not overlap.
void quantize(QuantizedBits bits, TypedSpan<const std::byte> values,
              std::span<std::byte> blocks) noexcept;
/// The values of `blocks`, rounded to the type of `values` as parameters are
/// (optimizer/gradient.h).
void dequantize(QuantizedBits bits, std::span<const std::byte> blocks,
                TypedSpan<std::byte> values) noexcept;
/// sums[i] += element i of `blocks`, in fp32: what the owner of a slice does for each rank in
/// turn.
void add_dequantized(QuantizedBits bits, std::span<const std::byte> blocks,
                     std::span<float> sums) noexcept;

}  // namespace ziggurat
