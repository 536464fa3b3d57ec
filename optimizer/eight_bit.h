// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit.h: moments in 8 bits, in blocks of 256 elements. An element is a code for one
// of 256 values, times the block's largest magnitude.
//
// The codes are the dynamic ones of bitsandbytes (create_dynamic_map(signed, 7, 8); Dettmers et al.
// 2022, 2110.02861): seven decades, each with twice as many values as the one below, so that small
// values keep a relative precision and large ones an absolute one. Signed codes are for moments
// that have a sign, unsigned ones for exp_avg_sq and Adagrad's sum.
//
// The largest errors (computed by tests/optimizer/eight_bit_test.cc), if the block's largest
// magnitude is 1:
//
//                absolute   of a value over 0.1   over 0.01   over 0.001   becomes zero below
//   signed         0.0071              6.2 %       11.0 %       18.0 %              2.8e-7
//   unsigned       0.0036              3.3 %        6.2 %       11.0 %           (does not)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat {

inline constexpr std::size_t kEightBitBlock = 256;
/// Records that several parameters share have a place for a scale at each multiple of so many
/// elements. The scale of a block is at its first element, which is at such a multiple. A block
/// ends with its parameter, so it may be short, and it never crosses a multiple of kEightBitBlock.
inline constexpr std::size_t kSharedRecordStep = 16;

/// Returns for how many elements of a record there is a place for a scale; `own_blocks` as in
/// StateKind.
constexpr std::size_t scale_step(bool own_blocks) noexcept {
  return own_blocks ? kSharedRecordStep : kEightBitBlock;
}

enum class EightBitCode : std::uint8_t { kSigned, kUnsigned };

/// Returns the values of the codes, ascending; the largest is 1.
const std::array<float, 256>& eight_bit_values(EightBitCode code) noexcept;

/// Sets values[i] to the value of code i times its block's scale. Any count; only the last block
/// may be short.
void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values) noexcept;

/// Encodes each value as the nearest code of its share of the block's largest magnitude, or of two
/// equally near codes the one nearer to zero. An unsigned value above zero becomes at least the
/// smallest code and never zero, because an update divides by the root of exp_avg_sq; an unsigned
/// value below zero becomes zero. A block with a value that is not finite becomes NaN as a whole; a
/// block whose largest magnitude is denormal becomes zero.
void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales) noexcept;

}  // namespace ziggurat
