// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/instructions.h: one rule for every class of instruction, for g++ and
// for nvcc: what the interpreter makes of the one must be the bits of the other.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ZIGGURAT_TEST_BOTH __host__ __device__
#else
#define ZIGGURAT_TEST_BOTH
#endif

namespace ziggurat::cuda_double {

enum class Rule : int {
  kFloatSum,
  kFloatDifference,
  kFloatProduct,
  kFloatQuotient,
  kFloatRoot,
  kFloatCompare,
  kDoubleSum,
  kDoubleProduct,
  kDoubleQuotient,
  kDoubleRoot,
  kDoubleCompare,
  kInt32,
  kInt64,
  kUnsigned32,
  kUnsigned64,
  kShort,
  kByte,
  kShifts,
  kBits,
  kWide,
  kFloatToInt,
  kIntToFloat,
  kFloatToDouble,
  kFloatFromDouble,
  kMinMax,
  kCount
};

/// A random pair of 64-bit words in, 64 bits out. NaNs come out as one bit pattern, since the
/// machines' differ.
template <class Float>
ZIGGURAT_TEST_BOTH inline Float one_nan(Float value) {
  return value != value ? Float{0} : value;
}

ZIGGURAT_TEST_BOTH inline float float_of(std::uint64_t word) {
  union {
    std::uint32_t bits;
    float value;
  } both;
  both.bits = static_cast<std::uint32_t>(word);
  return both.value;
}
ZIGGURAT_TEST_BOTH inline double double_of(std::uint64_t word) {
  union {
    std::uint64_t bits;
    double value;
  } both;
  both.bits = word;
  return both.value;
}
ZIGGURAT_TEST_BOTH inline std::uint64_t bits_of(float value) {
  union {
    float value;
    std::uint32_t bits;
  } both;
  both.value = one_nan(value);
  return both.bits;
}
ZIGGURAT_TEST_BOTH inline std::uint64_t bits_of(double value) {
  union {
    double value;
    std::uint64_t bits;
  } both;
  both.value = one_nan(value);
  return both.bits;
}

template <class T>
ZIGGURAT_TEST_BOTH inline std::uint64_t compared(T a, T b) {
  return (a < b ? 1u : 0u) | (a <= b ? 2u : 0u) | (a == b ? 4u : 0u) | (a != b ? 8u : 0u) |
         (a > b ? 16u : 0u) | (a >= b ? 32u : 0u) | (!(a < b) ? 64u : 0u) | (!(a >= b) ? 128u : 0u);
}

/// Wraps, divides and compares; every operation of the type takes part.
template <class Signed, class Unsigned>
ZIGGURAT_TEST_BOTH inline std::uint64_t integers(std::uint64_t x, std::uint64_t y) {
  const auto a = static_cast<Unsigned>(x);
  const auto b = static_cast<Unsigned>(y);
  const auto sa = static_cast<Signed>(a);
  const auto sb = static_cast<Signed>(b);
  Unsigned result = static_cast<Unsigned>(a + b);
  result = static_cast<Unsigned>(result ^ static_cast<Unsigned>(a - b) << 1);
  result = static_cast<Unsigned>(result + static_cast<Unsigned>(std::uint64_t{a} * b) * 5u);
  if (b != 0) result = static_cast<Unsigned>(result ^ (a / b) ^ (a % b) * 3u);
  if (sb != 0 && sb != -1) {
    result = static_cast<Unsigned>(result + static_cast<Unsigned>(sa / sb) * 7u +
                                   static_cast<Unsigned>(sa % sb));
  }
  result = static_cast<Unsigned>(result ^ static_cast<Unsigned>(sa < sb ? sa : sb) ^
                                 static_cast<Unsigned>(a < b ? b : a));
  return static_cast<std::uint64_t>(result) ^ compared(sa, sb) << 8 ^ compared(a, b);
}

ZIGGURAT_TEST_BOTH inline std::uint64_t shifted(std::uint64_t x, std::uint64_t y) {
  const unsigned n = static_cast<unsigned>(y) % 64;
  const unsigned m = n % 32;
  const auto word = static_cast<std::uint32_t>(x);
  return (x << n) ^ (x >> n) ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(x) >> n) ^
         (word << m) ^ std::uint64_t{word >> m} << 7 ^
         static_cast<std::uint64_t>(static_cast<std::int32_t>(word) >> m) ^
         (word << (32 - m) % 32 | word >> m);
}

ZIGGURAT_TEST_BOTH inline std::uint64_t bitwise(std::uint64_t x, std::uint64_t y) {
  std::uint64_t count = 0;
  for (std::uint64_t rest = x & ~y; rest != 0; rest &= rest - 1) ++count;
  const auto a = static_cast<std::uint32_t>(x);
  const auto b = static_cast<std::uint32_t>(y);
  return ((x | y) ^ (x & (y << 3))) + (count << 40) + ((a & b) | (~a & (b >> 5)));
}

template <class To, class From>
ZIGGURAT_TEST_BOTH inline std::uint64_t to_integer(From value, From limit) {
  // Where C++ defines it; the rest has a test of its own.
  return value > -limit && value < limit ? static_cast<std::uint64_t>(static_cast<To>(value)) : 1;
}

}  // namespace ziggurat::cuda_double
