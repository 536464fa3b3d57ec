// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/gradient_test.cc: rounding once, in place, and sums that do not depend on the
// machine.
#include "optimizer/gradient.h"

#include <algorithm>
#include <cmath>

#include "base/numerics/float16.h"
#include "optimizer/kernels.h"
#include "tests/support/hard_floats.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace gradient_test {

using testing::for_each_target;
using testing::from_bits;
using testing::HardFloats;
using testing::OffsetArray;
using testing::same_bits;

std::vector<float> ordinary_values(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = 1e-3f * normal(random);
  return values;
}

TEST(RoundToBf16, TiesGoAwayFromZeroAndNaNStaysNaN) {
  struct Case {
    std::uint32_t value;
    bf16 rounded;
  };
  const std::vector<Case> cases = {
      {0x3f808000, 0x3f81}, {0x3f818000, 0x3f82}, {0xbf808000, 0xbf81},  // ties
      {0x3f807fff, 0x3f80}, {0x3f808001, 0x3f81},                        // their neighbours
      {0x00008000, 0x0001}, {0x00007fff, 0x0000}, {0x807fffff, 0x8080},  // denormals
      {0x7f7f7fff, 0x7f7f}, {0x7f7f8000, 0x7f80}, {0xff7fffff, 0xff80},  // up to infinity
      {0x7f800000, 0x7f80}, {0xff800000, 0xff80},                        // infinity
      {0x7f800001, 0x7fc0}, {0xff80ffff, 0xffc0}, {0x7fffffff, 0x7fff},  // NaN
  };
  std::vector<float> values;
  for (const Case& one : cases) values.push_back(from_bits(one.value));
  while (values.size() < 64) values.push_back(values[values.size() - cases.size()]);
  for_each_target([&] {
    std::vector<bf16> out(values.size());
    round_to_bf16(values, out);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      EXPECT_EQ(out[i], cases[i].rounded) << std::hex << cases[i].value;
    }
  });
}

TEST(RoundToBf16, EveryTargetRoundsEveryUpperHalfAlike) {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper <= 0xffff; ++upper) {
    for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(from_bits(upper << 16 | lower));
    }
  }
  for_each_target([&] {
    std::vector<bf16> out(values.size());
    round_to_bf16(values, out);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(out[i], float_to_bf16(values[i])) << std::hex << testing::to_bits(values[i]);
    }
  });
}

TEST(RoundToBf16, AnyCountAndAlignment) {
  constexpr std::size_t kMost = 133;
  HardFloats hard(5);
  OffsetArray<float> values(kMost, 3);
  for (float& value : values.span()) value = hard.next();
  for_each_target([&] {
    for (std::size_t count = 0; count <= kMost; ++count) {
      OffsetArray<bf16> out(kMost, 7);
      std::ranges::fill(out.span(), bf16{0x1234});
      round_to_bf16(values.first(count), out.first(count));
      for (std::size_t i = 0; i < kMost; ++i) {
        ASSERT_EQ(out.data()[i], i < count ? float_to_bf16(values.data()[i]) : 0x1234) << count;
      }
    }
  });
}

TEST(RoundParams, IsEachTypesRounding) {
  const std::vector<float> masters = ordinary_values(133, 3);
  for_each_target([&] {
    std::vector<bf16> halves(masters.size());
    round_params(masters, as_typed(std::span(halves), DType::kBFloat16));
    std::vector<fp16> fp16s(masters.size());
    round_params(masters, as_typed(std::span(fp16s), DType::kFloat16));
    std::vector<float> floats(masters.size());
    round_params(masters, as_typed(std::span(floats)));
    for (std::size_t i = 0; i < masters.size(); ++i) {
      ASSERT_EQ(halves[i], float_to_bf16(masters[i]));
      ASSERT_EQ(fp16s[i], float_to_fp16(masters[i]));
    }
    ASSERT_EQ(floats, masters);
  });
}

/// What round_gradient promises, written as it is promised.
double sum_of_squares_as_specified(std::span<const bf16> rounded) {
  double sum = 0;
  for (std::size_t begin = 0; begin < rounded.size(); begin += 4096) {
    float lanes[16] = {};
    const std::size_t end = std::min(rounded.size(), begin + 4096);
    for (std::size_t i = begin; i < end; ++i) {
      const float value = bf16_to_float(rounded[i]);
      lanes[i % 16] += value * value;
    }
    for (const std::size_t half : {8, 4, 2, 1}) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    sum += static_cast<double>(lanes[0]);
  }
  return sum;
}

TEST(RoundGradient, EveryTargetInPlaceOrNotAtEverySize) {
  constexpr std::size_t kMost = 4099;
  const std::vector<float> values = ordinary_values(kMost, 6);
  std::vector<bf16> want(kMost);
  for (std::size_t i = 0; i < kMost; ++i) want[i] = float_to_bf16(values[i]);
  std::vector<double> sums;
  for (std::size_t count = 0; count <= kMost; ++count) {
    sums.push_back(sum_of_squares_as_specified(std::span(want).first(count)));
  }
  OffsetArray<float> accumulator(kMost, 1);
  OffsetArray<bf16> apart(kMost, 3);
  for_each_target([&] {
    for (std::size_t count = 0; count <= kMost; ++count) {
      accumulator.assign(std::span(values).first(count));
      ASSERT_EQ(round_gradient(accumulator.first(count), apart.first(count)), sums[count]) << count;
      ASSERT_TRUE(same_bits<bf16>(apart.first(count), std::span(want).first(count))) << count;

      bf16* over = reinterpret_cast<bf16*>(accumulator.data());
      ASSERT_EQ(round_gradient(accumulator.first(count), {over, count}), sums[count]) << count;
      ASSERT_EQ(std::memcmp(over, want.data(), count * sizeof(bf16)), 0) << count;
    }
  });
}

TEST(RoundGradient, HardValuesInPlace) {
  constexpr std::size_t kCount = 2 * kTileElements + 77;
  HardFloats hard(7);
  std::vector<float> values(kCount);
  for (float& value : values) value = hard.next();
  for_each_target([&] {
    std::vector<float> memory = values;
    bf16* over = reinterpret_cast<bf16*>(memory.data());
    EXPECT_TRUE(std::isnan(round_gradient(memory, {over, kCount})));
    for (std::size_t i = 0; i < kCount; ++i) {
      bf16 got;
      std::memcpy(&got, over + i, sizeof(got));
      ASSERT_EQ(got, float_to_bf16(values[i])) << i;
    }
  });
}

TEST(RoundGradient, SumIsNearTheExactOne) {
  const std::vector<float> values = ordinary_values(kTileElements, 8);
  std::vector<bf16> out(values.size());
  const double sum = round_gradient(values, out);
  long double exact = 0;
  for (const bf16 value : out) {
    const auto wide = static_cast<long double>(bf16_to_float(value));
    exact += wide * wide;
  }
  // A square of a bf16 is exact in fp32. A lane adds 256 positive numbers and the tree 4 more: at
  // most 260 half-ulps.
  EXPECT_NEAR(sum / static_cast<double>(exact), 1.0, 260 * 0x1p-24);
}

TEST(RoundGradient, ATilesSumDependsOnItsValuesOnly) {
  const std::vector<float> values = ordinary_values(3 * kTileElements, 9);
  std::vector<bf16> out(values.size());
  const std::span all(values);
  for_each_target([&] {
    for (std::size_t tile = 0; tile < 3; ++tile) {
      const auto source = all.subspan(tile * kTileElements, kTileElements);
      const double in_place_of_three =
          round_gradient(source, std::span(out).subspan(tile * kTileElements, kTileElements));
      for (const std::size_t offset : {0, 1, 9, 16}) {
        OffsetArray<float> elsewhere(kTileElements, offset);
        elsewhere.assign(source);
        EXPECT_EQ(round_gradient(elsewhere.span(), std::span(out).first(kTileElements)),
                  in_place_of_three);
      }
    }
  });
}

TEST(RoundGradient, InfinityAndNaNShowInTheSum) {
  for_each_target([&] {
    for (const std::size_t at : {0u, 15u, 31u, 4095u, 4096u, 5000u}) {
      std::vector<float> values(5001, 0.5f);
      std::vector<bf16> out(values.size());
      values[at] = -std::numeric_limits<float>::infinity();
      EXPECT_EQ(round_gradient(values, out), std::numeric_limits<double>::infinity()) << at;
      values[at] = from_bits(0xff800001);
      EXPECT_TRUE(std::isnan(round_gradient(values, out))) << at;
    }
  });
}

/// Other types: the rounding of each, and the same order of sums.
TEST(RoundGradient, OtherTypesAtManySizesInPlaceOrNot) {
  constexpr std::size_t kMost = 4099;
  const std::vector<float> values = ordinary_values(kMost, 10);
  std::vector<fp16> halves(kMost);
  std::vector<float> widened(kMost);
  for (std::size_t i = 0; i < kMost; ++i) {
    halves[i] = float_to_fp16(values[i]);
    widened[i] = fp16_to_float(halves[i]);
  }
  const auto sum_of = [](std::span<const float> wide) {
    double sum = 0;
    for (std::size_t begin = 0; begin < wide.size(); begin += 4096) {
      float lanes[16] = {};
      for (std::size_t i = begin; i < std::min(wide.size(), begin + 4096); ++i)
        lanes[i % 16] += wide[i] * wide[i];
      for (const std::size_t half : {8, 4, 2, 1}) {
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
      }
      sum += static_cast<double>(lanes[0]);
    }
    return sum;
  };
  OffsetArray<float> accumulator(kMost, 1), wide(kMost, 5);
  OffsetArray<fp16> apart(kMost, 3);
  for_each_target([&] {
    for (const std::size_t count : {0u, 1u, 15u, 31u, 32u, 33u, 1000u, 4096u, 4099u}) {
      const double want = sum_of(std::span(widened).first(count));
      accumulator.assign(std::span(values).first(count));
      const auto out = as_typed(apart.first(count), DType::kFloat16);
      ASSERT_EQ(round_gradient(accumulator.first(count), out), want) << count;
      ASSERT_TRUE(same_bits<fp16>(apart.first(count), std::span(halves).first(count))) << count;
      auto* over = reinterpret_cast<fp16*>(accumulator.data());
      const auto in_place = as_typed(std::span(over, count), DType::kFloat16);
      ASSERT_EQ(round_gradient(accumulator.first(count), in_place), want) << count;
      ASSERT_EQ(std::memcmp(over, halves.data(), count * sizeof(fp16)), 0) << count;

      const double exact = sum_of(std::span(values).first(count));
      accumulator.assign(std::span(values).first(count));
      ASSERT_EQ(round_gradient(accumulator.first(count), as_typed(wide.first(count))), exact);
      ASSERT_TRUE(same_bits<float>(wide.first(count), std::span(values).first(count))) << count;
    }
  });
}

TEST(RoundGradient, TheSumIsFiniteExactlyWhereEveryValueIs) {
  for_each_target([&] {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const auto sum_with = [&](float value) {
        std::vector<float> values(5001, 0.5f);
        values[4100] = value;
        std::vector<float> out(values.size());
        return round_gradient(
            values,
            {dtype,
             std::as_writable_bytes(std::span(out)).first(values.size() * size_bytes(dtype))});
      };
      EXPECT_FALSE(std::isfinite(sum_with(std::numeric_limits<float>::infinity())));
      EXPECT_TRUE(std::isnan(sum_with(from_bits(0x7f800001))));
      // Its square is beyond fp32, in fp16 the value itself is beyond.
      const double large = sum_with(3e38f);
      EXPECT_EQ(std::isfinite(large), dtype != DType::kFloat16);
      if (dtype != DType::kFloat16) {
        EXPECT_NEAR(large / 9e76, 1.0, 0.02);
      }
      EXPECT_EQ(std::isfinite(sum_with(65519.0f)), true);
      EXPECT_EQ(std::isfinite(sum_with(65520.0f)), dtype != DType::kFloat16);
    }
  });
}

TEST(RoundGradientDeathTest, WantsAPlaceForEachValue) {
  const std::vector<float> values(4);
  std::vector<bf16> out(3);
  EXPECT_DEATH(round_gradient(values, out), "4 values into 3 places");
}

TEST(ClipCoefficient, IsTorchs) {
  EXPECT_EQ(clip_coefficient(0.5, 1.0f), 1.0f);
  EXPECT_EQ(clip_coefficient(4.0, 1.0f), static_cast<float>(1.0 / (4.0 + 1e-6)));
  EXPECT_EQ(clip_coefficient(1.0, 1.0f), static_cast<float>(1.0 / (1.0 + 1e-6)));
  EXPECT_EQ(clip_coefficient(0.0, 1.0f), 1.0f);
  EXPECT_EQ(clip_coefficient(1e9, 0.0f), 1.0f) << "0 turns clipping off";
  EXPECT_EQ(clip_coefficient(std::numeric_limits<double>::infinity(), 1.0f), 0.0f);
  EXPECT_TRUE(std::isnan(clip_coefficient(std::nan(""), 1.0f))) << "a poisoned norm is not hidden";
}

}  // namespace gradient_test
}  // namespace ziggurat
