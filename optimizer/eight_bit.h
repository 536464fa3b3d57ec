// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit.h: moments in 8 bits: blocks of 256 elements, each element a code of 256
// values times the block's largest magnitude.
//
// The codes are the dynamic ones of bitsandbytes (create_dynamic_map(signed, 7, 8); Dettmers et al.
// 2022, 2110.02861): seven decades, each with twice as many values as the one below, so that small
// values keep a relative precision and large ones an absolute one. Signed for what has a sign,
// unsigned for exp_avg_sq and Adagrad's sum.
//
// Errors at most (tests/optimizer/eight_bit_test.cc computes them), with 1 the block's largest
// magnitude:
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

enum class EightBitCode : std::uint8_t { kSigned, kUnsigned };

/// The values, ascending; the largest is 1.
const std::array<float, 256>& eight_bit_values(EightBitCode code) noexcept;

/// values[i] = code of i times its block's scale. Any count; only the last block may be short.
void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values) noexcept;

/// The nearest code of each value over its block's largest magnitude, the one nearer to zero where
/// two are as near. An unsigned value above zero never becomes zero, but the smallest code: the
/// root of exp_avg_sq divides; one below zero becomes zero. A block with a value that is not finite
/// becomes NaN as a whole; one whose largest magnitude is denormal becomes zero.
void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales) noexcept;

}  // namespace ziggurat
