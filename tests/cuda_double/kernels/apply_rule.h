// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/apply_rule.h: the rules of instructions.h, by number.
#pragma once

#include <cmath>

#include "tests/cuda_double/kernels/instructions.h"

namespace ziggurat::cuda_double {

ZIGGURAT_TEST_BOTH inline std::uint64_t apply(Rule rule, std::uint64_t x, std::uint64_t y) {
  const float a = float_of(x);
  const float b = float_of(y);
  const double da = double_of(x);
  const double db = double_of(y);
  switch (rule) {
    case Rule::kFloatSum: return bits_of(a + b);
    case Rule::kFloatDifference: return bits_of(a - b);
    case Rule::kFloatProduct: return bits_of(a * b);
    case Rule::kFloatQuotient: return bits_of(a / b);
    case Rule::kFloatRoot: return bits_of(sqrtf(a));
    case Rule::kFloatCompare: return compared(a, b);
    case Rule::kDoubleSum: return bits_of(da + db);
    case Rule::kDoubleProduct: return bits_of(da * db);
    case Rule::kDoubleQuotient: return bits_of(da / db);
    case Rule::kDoubleRoot: return bits_of(sqrt(da));
    case Rule::kDoubleCompare: return compared(da, db);
    case Rule::kInt32: return integers<std::int32_t, std::uint32_t>(x, y);
    case Rule::kInt64: return integers<std::int64_t, std::uint64_t>(x, y);
    case Rule::kUnsigned32: return integers<std::int32_t, std::uint32_t>(x >> 32, y >> 40);
    case Rule::kUnsigned64: return integers<std::int64_t, std::uint64_t>(x, y >> 33);
    case Rule::kShort: return integers<std::int16_t, std::uint16_t>(x, y >> 8);
    case Rule::kByte: return integers<std::int8_t, std::uint8_t>(x, y);
    case Rule::kShifts: return shifted(x, y);
    case Rule::kBits: return bitwise(x, y);
    case Rule::kWide:
      return static_cast<std::uint64_t>(static_cast<std::uint32_t>(x)) *
                 static_cast<std::uint32_t>(y) +
             static_cast<std::uint64_t>(std::int64_t{static_cast<std::int32_t>(x >> 32)} *
                                        static_cast<std::int32_t>(y >> 32));
    case Rule::kFloatToInt:
      return to_integer<std::int32_t>(a, 2147483648.0f) ^
             to_integer<std::int64_t>(a, 9223372036854775808.0f) << 1 ^
             to_integer<std::int64_t>(da, 9223372036854775808.0) << 2;
    case Rule::kIntToFloat:
      return bits_of(static_cast<float>(static_cast<std::int32_t>(x))) ^
             bits_of(static_cast<float>(y)) << 20 ^ bits_of(static_cast<double>(x ^ y)) ^
             bits_of(static_cast<float>(static_cast<std::int64_t>(x))) << 7;
    case Rule::kFloatToDouble: return bits_of(static_cast<double>(a));
    case Rule::kFloatFromDouble: return bits_of(static_cast<float>(da));
    case Rule::kMinMax: {
      // glibc answers a signalling NaN with NaN, and zeros of two signs are one to fminf in C.
      const float c = a != a ? float_of(0x7fc00000) : a;
      const float d = b != b ? float_of(0x7fc00000) : b;
      return bits_of(fminf(c, d) + 0.0f) ^ bits_of(fmaxf(c, d) + 0.0f) << 32;
    }
    case Rule::kCount: break;
  }
  return 0;
}

}  // namespace ziggurat::cuda_double
