// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/nan.h: which NaN an instruction gives.
//
// Single precision: "the quiet NaN of bit pattern 0x7fffffff" (CUDA C++ Programming Guide,
// floating- point standard). What the PTX ISA calls an unspecified NaN gets bits that nobody should
// count on.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ziggurat::cuda_double::ptx {

inline constexpr std::uint32_t kNan32 = 0x7fffffff;
inline constexpr std::uint16_t kNan16 = 0x7fff;  // PTX ISA 9.7.4: canonical NaN of .f16 and .bf16
inline constexpr std::uint32_t kUnspecified32 = 0xffc54321;
inline constexpr std::uint64_t kUnspecified64 = 0xfff8123456789abc;

inline float canonical(float value) noexcept {
  return std::isnan(value) ? std::bit_cast<float>(kNan32) : value;
}
/// A double's payload is not specified.
inline double canonical(double value) noexcept {
  return std::isnan(value) ? std::bit_cast<double>(kUnspecified64) : value;
}

}  // namespace ziggurat::cuda_double::ptx
