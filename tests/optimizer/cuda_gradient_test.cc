// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/cuda_gradient_test.cc: the kernels' rounding, sums and scaling of gradients
// against the specification, bit for bit: in place and not, at odd sizes and starts.
#include "optimizer/cuda/gradient.h"

#include "base/error.h"
#include "optimizer/gradient.h"
#include "optimizer/square_sum.h"
#include "tests/optimizer/state.h"
#include "tests/support/cuda_memory.h"

namespace ziggurat::testing {
namespace {

constexpr std::size_t kTile = kTileElements;
constexpr std::array<std::size_t, 13> kCounts = {0,
                                                 1,
                                                 15,
                                                 17,
                                                 4095,
                                                 4096,
                                                 4097,
                                                 8200,
                                                 kTile - 1,
                                                 kTile,
                                                 kTile + 1,
                                                 3 * kTile + 5,
                                                 9 * kTile + 4099};

std::vector<float> ordinary(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = 1e-3F * normal(random);
  return values;
}

std::vector<float> hard(std::size_t count, std::uint32_t seed) {
  HardFloats floats(seed);
  std::vector<float> values(count);
  for (float& value : values) value = floats.next();
  return values;
}

std::vector<std::byte> rounded_to(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) store_value(dtype, bytes.data(), i, values[i]);
  return bytes;
}

/// Tile by tile, as round_gradient is called.
std::vector<double> round_as_specified(std::span<const float> values, TypedSpan<std::byte> out) {
  std::vector<double> sums;
  force_simd_target("scalar");
  for (std::size_t begin = 0; begin < values.size(); begin += kTile) {
    const std::size_t count = std::min(kTile, values.size() - begin);
    sums.push_back(round_gradient(values.subspan(begin, count), out.subspan(begin, count)));
  }
  force_simd_target({});
  return sums;
}

void expect_rounded(DType dtype, const std::vector<float>& values, std::size_t offset,
                    std::uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << values.size() << " values to " << to_string(dtype));
  std::vector<std::byte> want(values.size() * size_bytes(dtype));
  const std::vector<double> want_sums = round_as_specified(values, {dtype, want});
  const std::vector<double> no_sums(want_sums.size(), -1.0);

  OnDevice accumulator(values, offset);
  OnDevice out(std::vector<std::byte>(want.size()), offset * size_bytes(dtype));
  OnDevice sums(no_sums);
  draw_order(seed);
  cuda::round_gradient(nullptr, accumulator.as<const float>(), {dtype, out.bytes()},
                       sums.as<double>());
  EXPECT_TRUE(same_bytes(out.read(), want)) << "apart";
  EXPECT_TRUE(same_bytes(sums.read(), std::as_bytes(std::span(want_sums)))) << "of sums, apart";
  EXPECT_TRUE(same_bytes(accumulator.read(), std::as_bytes(std::span(values))));

  OnDevice sums_in_place(no_sums);
  cuda::round_gradient(nullptr, accumulator.as<const float>(),
                       {dtype, accumulator.bytes().first(want.size())}, sums_in_place.as<double>());
  const std::vector<std::byte> over = accumulator.read();
  EXPECT_TRUE(same_bytes(std::span(over).first(want.size()), want)) << "in place";
  EXPECT_TRUE(same_bytes(sums_in_place.read(), std::as_bytes(std::span(want_sums))))
      << "of sums, in place";
}

TEST(CudaRoundGradient, EverySizeInPlaceAndNot) {
  std::uint32_t seed = 1;
  for (const std::size_t count : kCounts) {
    for (const DType dtype : kAllTypes) {
      ++seed;
      expect_rounded(dtype, ordinary(count, seed), count % 3, seed);
      ASSERT_FALSE(::testing::Test::HasFailure());
    }
  }
}

TEST(CudaRoundGradient, HardValues) {
  for (const DType dtype : kAllTypes) expect_rounded(dtype, hard(2 * kTile + 77, 9), 1, 5);
}

TEST(CudaRoundGradient, SquaresThatOverflowAreAddedInDouble) {
  std::vector<float> values = ordinary(2 * kTile, 3);
  for (std::size_t i = 0; i < values.size(); i += 100) values[i] = 3e19F * values[i + 1] * 1e3F;
  values[kTile + 4096 * 2 + 5] = std::numeric_limits<float>::infinity();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) expect_rounded(dtype, values, 0, 7);
  std::vector<double> sums(2);
  std::vector<std::byte> out(values.size() * 2);
  sums = round_as_specified(values, {DType::kBFloat16, out});
  EXPECT_GT(sums[0], 1e38);  // so the case is what its name says
  EXPECT_TRUE(std::isfinite(sums[0]));
  EXPECT_TRUE(std::isinf(sums[1]));
}

/// A first block whose sum is 2^54 times each of the others': one by one they vanish beside it, and
/// together they would not.
TEST(CudaRoundGradient, SumsOfBlocksAreAddedFromTheFirstOn) {
  std::vector<float> values(kTile + 3 * internal::kSumBlock, 0.0F);
  for (std::size_t i = 0; i < values.size(); i += internal::kSumBlock)
    values[i] = i % kTile == 0 ? 0x1p15F : 0x1p-12F;
  for (const DType dtype : kAllTypes) {
    expect_rounded(dtype, values, 0, 21);
    std::vector<std::byte> out(values.size() * size_bytes(dtype));
    const std::vector<double> sums = round_as_specified(values, {dtype, out});
    EXPECT_EQ(sums[0], 0x1p30);
    EXPECT_EQ(sums[1], 0x1p30);
    EXPECT_GT((3 * 0x1p-24) + 0x1p30, 0x1p30);  // so the case is what its name says
  }
}

/// In place, what an order of blocks may change is a value that was overwritten before it was read.
TEST(CudaRoundGradient, NoOrderOfBlocksAndThreadsChangesABit) {
  const std::vector<float> values = ordinary(13 * kTile + 100, 4);
  for (std::uint64_t seed = 1; seed <= 5; ++seed)
    expect_rounded(DType::kBFloat16, values, 0, 1000 * seed);
}

TEST(CudaRoundGradient, RefusesArraysThatOverlapOtherwise) {
  OnDevice accumulator(ordinary(2 * kTile, 5), 0);
  OnDevice sums(std::vector<double>(2));
  const auto out = accumulator.bytes().subspan(4, 2 * kTile * 2);
  try {
    cuda::round_gradient(nullptr, accumulator.as<const float>(), {DType::kBFloat16, out},
                         sums.as<double>());
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the arrays overlap"));
  }
}

TEST(CudaAccumulate, AddsEveryTypeScaledOrNot) {
  for (const DType dtype : kAllTypes) {
    for (const float scale : {1.0F, 0.125F, -3.7F}) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{1023}, kTile + 5}) {
        const std::vector<std::byte> values = rounded_to(dtype, hard(count, 11));
        std::vector<float> sums = hard(count, 12);
        OnDevice device_values(values, size_bytes(dtype));
        OnDevice device_sums(sums, 3);
        cuda::accumulate_gradient(nullptr, {dtype, device_values.bytes()}, scale,
                                  device_sums.as<float>());
        accumulate_gradient({dtype, values}, scale, sums);
        EXPECT_TRUE(same_bytes(device_sums.read(), std::as_bytes(std::span(sums))));
        EXPECT_TRUE(same_bytes(device_values.read(), values));
      }
    }
  }
}

TEST(CudaWiden, IsExactAndKeepsANaNsPayload) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::byte> every(65536 * 2);
    for (std::size_t i = 0; i < 65536; ++i)
      store_element(every.data(), i, static_cast<std::uint16_t>(i));
    std::vector<float> want(65536);
    widen({dtype, every}, want);
    OnDevice values(every, 2);
    OnDevice out(std::vector<float>(65536), 1);
    cuda::widen(nullptr, {dtype, values.bytes()}, out.as<float>());
    EXPECT_TRUE(same_bytes(out.read(), std::as_bytes(std::span(want))));
  }
}

TEST(CudaScale, ScalesAndTellsWhichTilesOverflow) {
  for (const DType dtype : kAllTypes) {
    for (const float factor : {0.5F, 1e-3F, 3e4F, std::numeric_limits<float>::infinity()}) {
      for (const bool hard_values : {false, true}) {
        const std::size_t count = 3 * kTile + 21;
        const std::vector<float> values = hard_values ? hard(count, 13) : ordinary(count, 14);
        std::vector<std::byte> want = rounded_to(dtype, values);
        OnDevice device_values(want, size_bytes(dtype));
        OnDevice words(std::vector<std::uint32_t>(4, 0xdeadu));
        cuda::scale_gradient(nullptr, {dtype, device_values.bytes()}, factor,
                             words.as<std::uint32_t>());
        std::vector<std::uint32_t> want_words;
        for (std::size_t begin = 0; begin < count; begin += kTile) {
          const TypedSpan<std::byte> all{dtype, want};
          const bool finite =
              scale_gradient(all.subspan(begin, std::min(kTile, count - begin)), factor);
          want_words.push_back(finite ? 0 : 1);
        }
        EXPECT_TRUE(same_bytes(device_values.read(), want));
        EXPECT_TRUE(same_bytes(words.read(), std::as_bytes(std::span(want_words))));
        if (hard_values) continue;  // some of which came so
        const std::uint32_t word = std::isfinite(factor) ? 0 : 1;
        EXPECT_EQ(want_words, std::vector<std::uint32_t>(4, word)) << factor;
      }
    }
  }
}

TEST(CudaClear, Zeroes) {
  OnDevice values(hard(1001, 15), 1);
  cuda::clear(nullptr, values.bytes());
  EXPECT_TRUE(same_bytes(values.read(), std::vector<std::byte>(1001 * sizeof(float))));
}

}  // namespace
}  // namespace ziggurat::testing
