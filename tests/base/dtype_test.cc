// SPDX-License-Identifier: Apache-2.0
// tests/base/dtype_test.cc: the roundings from fp32 to 16 bits, compared with their definitions.
#include "base/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "base/numerics/float16.h"

namespace ziggurat {
namespace dtype_test {

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

TEST(BFloat16, KeepsWhatItCanHold) {
  for (std::uint32_t high = 0; high <= 0xffff; ++high) {
    const float value = from_bits(high << 16);
    if (std::isnan(value)) continue;
    ASSERT_EQ(float_to_bf16(value), high);
    ASSERT_EQ(bits_of(bf16_to_float(static_cast<bf16>(high))), high << 16);
  }
}

TEST(BFloat16, RoundsToNearestAndTiesAwayFromZero) {
  EXPECT_EQ(float_to_bf16(from_bits(0x3f807fff)), 0x3f80);
  EXPECT_EQ(float_to_bf16(from_bits(0x3f808000)), 0x3f81);  // a tie, even below
  EXPECT_EQ(float_to_bf16(from_bits(0x3f818000)), 0x3f82);  // a tie, even above
  EXPECT_EQ(float_to_bf16(from_bits(0xbf808000)), 0xbf81);
  EXPECT_EQ(float_to_bf16(from_bits(0x00000001)), 0x0000);
  EXPECT_EQ(float_to_bf16(from_bits(0x00008000)), 0x0001);              // a denormal tie
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);  // nearest is infinity
  EXPECT_EQ(float_to_bf16(-0.0F), 0x8000);
}

TEST(BFloat16, NanStaysNanAndBecomesQuiet) {
  for (const std::uint32_t bits :
       {0x7fc00000U, 0x7f800001U, 0xff800001U, 0x7fffffffU, 0xffffffffU}) {
    const bf16 value = float_to_bf16(from_bits(bits));
    EXPECT_TRUE(std::isnan(bf16_to_float(value))) << std::hex << bits;
    EXPECT_NE(value & 0x0040, 0) << std::hex << bits;
  }
}

TEST(BFloat16, IsTheNearestOfTheTwoNeighbours) {
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint32_t bits = random();
    const float value = from_bits(bits);
    if (!std::isfinite(value) || (bits & 0x7f800000U) == 0x7f000000U) continue;
    const double below = from_bits(bits & 0xffff0000U);
    const double above = from_bits((bits & 0xffff0000U) + 0x10000U);
    const double rounded = bf16_to_float(float_to_bf16(value));
    const double distance_below = std::abs(value - below);
    const double distance_above = std::abs(above - value);
    ASSERT_EQ(rounded, distance_below < distance_above ? below : above) << "bits " << bits;
  }
}

TEST(Float16, WidensExactly) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    const float value = fp16_to_float(static_cast<fp16>(bits));
    const std::uint32_t exponent = bits >> 10 & 31U;
    const auto fraction = static_cast<float>(bits & 0x3ffU);
    float want = exponent == 0 ? std::ldexp(fraction, -24)
                               : std::ldexp(1024.0F + fraction, static_cast<int>(exponent) - 25);
    if (exponent == 31) want = fraction == 0 ? INFINITY : NAN;
    if ((bits & 0x8000U) != 0) want = -want;
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      ASSERT_EQ(bits_of(value), bits_of(want)) << bits;
      ASSERT_EQ(float_to_fp16(value), bits);
    }
  }
  for (const std::uint32_t nan : {0x7fc00000U, 0xffc00000U, 0x7f800001U, 0xffffffffU})
    EXPECT_EQ(float_to_fp16(from_bits(nan)), 0x7e00);
}

TEST(Float16, RoundsToTheNearestAndTiesToEven) {
  for (std::uint32_t below = 0; below < 0x7bffU; ++below) {
    const float low = fp16_to_float(static_cast<fp16>(below));
    const float high = fp16_to_float(static_cast<fp16>(below + 1));
    const float middle = (low + high) / 2;  // exact
    const std::uint32_t even = below + (below & 1U);
    ASSERT_EQ(float_to_fp16(std::nextafter(middle, 0.0F)), below);
    ASSERT_EQ(float_to_fp16(middle), even);
    ASSERT_EQ(float_to_fp16(-middle), even | 0x8000U);
    ASSERT_EQ(float_to_fp16(std::nextafter(middle, 1e6F)), below + 1);
  }
  EXPECT_EQ(float_to_fp16(65519.99F), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_fp16(-1e30F), 0xfc00);
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_bytes(DType::kFloat32), 4U);
  EXPECT_EQ(size_bytes(DType::kBFloat16), 2U);
  EXPECT_EQ(size_bytes(DType::kFloat16), 2U);
  EXPECT_EQ(to_string(DType::kBFloat16), "bf16");
  for (const std::string_view name : kDTypeNames) EXPECT_EQ(to_string(*parse_dtype(name)), name);
  EXPECT_EQ(parse_dtype("int4"), std::nullopt);
  EXPECT_EQ(parse_dtype(""), std::nullopt);
}

}  // namespace dtype_test
}  // namespace ziggurat
