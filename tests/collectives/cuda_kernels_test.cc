// SPDX-License-Identifier: Apache-2.0
// tests/collectives/cuda_kernels_test.cc: the kernels' sums of ranks and quantized blocks against
// the specification, bit for bit, at odd sizes and starts.
#include <algorithm>

#include "base/error.h"
#include "base/numerics/typed_value.h"
#include "collectives/cuda/rank_sum.h"
#include "collectives/quantize/cuda/quantize.h"
#include "collectives/quantize/quantize.h"
#include "collectives/rank_sum.h"
#include "tests/support/cuda_memory.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::testing {
namespace {

constexpr std::array kTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr std::array kBoth = {QuantizedBits::k8, QuantizedBits::k4};
constexpr std::array<std::size_t, 9> kCounts = {0, 1, 2, 255, 256, 257, 1000, 1024, 5001};

/// Hard values; every third block of 256 ordinary ones, so that not all blocks become NaN.
std::vector<std::byte> drawn(DType dtype, std::size_t count, std::uint32_t seed) {
  HardFloats hard(seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * size_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const bool ordinary = i / kQuantizedBlock % 3 != 1;
    store_value(dtype, bytes.data(), i, ordinary ? 0.02F * normal(random) : hard.next());
  }
  return bytes;
}

std::span<const std::byte> bytes_of(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

TEST(CudaRankSum, AddsInRankOrderOverOneOfTheRowsOrNot) {
  for (const DType dtype : kTypes) {
    for (const std::size_t ranks : {1u, 2u, 3u, 8u}) {
      for (const std::size_t count : kCounts) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << count << " elements");
        const std::size_t row_bytes = (count + 3) * size_bytes(dtype);
        std::vector<std::byte> rows = drawn(dtype, ranks * (count + 3), 21);
        std::vector<const std::byte*> contributions;
        for (std::size_t r = 0; r < ranks; ++r)
          contributions.push_back(rows.data() + r * row_bytes);
        std::vector<std::byte> want(count * size_bytes(dtype));
        scalar::sum_in_rank_order(contributions, dtype, 0, count, want.data());

        OnDevice device_rows(rows, size_bytes(dtype));
        OnDevice sum(std::vector<std::byte>(want.size()), size_bytes(dtype));
        const cuda::RankRows all{device_rows.bytes().data(), row_bytes, ranks};
        draw_order(count);
        cuda::sum_ranks(nullptr, all, dtype, count, sum.bytes().data());
        EXPECT_TRUE(same_bytes(sum.read(), want));
        EXPECT_TRUE(same_bytes(device_rows.read(), rows));

        const std::size_t last = (ranks - 1) * row_bytes;
        cuda::sum_ranks(nullptr, all, dtype, count, device_rows.bytes().data() + last);
        std::ranges::copy(want, rows.begin() + static_cast<std::ptrdiff_t>(last));
        EXPECT_TRUE(same_bytes(device_rows.read(), rows)) << "over the last row";
      }
    }
  }
}

TEST(CudaRankSum, RefusesARowThatIsNotAligned) {
  OnDevice rows(drawn(DType::kFloat32, 64, 1), 0);
  OnDevice sum(std::vector<float>(10));
  EXPECT_THROW(cuda::sum_ranks(nullptr, {rows.bytes().data(), 42, 2}, DType::kFloat32, 10,
                               sum.bytes().data()),
               Error);
}

class CudaQuantize : public ::testing::TestWithParam<QuantizedBits> {};

TEST_P(CudaQuantize, GivesTheSpecificationsBlocksAndValues) {
  const QuantizedBits bits = GetParam();
  for (const DType dtype : kTypes) {
    for (const std::size_t count : kCounts) {
      for (const std::size_t start : {0u, 1u, 3u}) {  // of the blocks, in bytes
        SCOPED_TRACE(::testing::Message() << to_string(dtype) << ", " << count << " elements");
        const std::vector<std::byte> values = drawn(dtype, count, 31);
        std::vector<std::byte> want(quantized_bytes(bits, count));
        force_simd_target("scalar");
        quantize(bits, {dtype, values}, want);
        OnDevice device_values(values, size_bytes(dtype));
        OnDevice blocks(std::vector<std::byte>(want.size()), start);
        draw_order(count);
        cuda::quantize(nullptr, bits, {dtype, device_values.bytes()}, blocks.bytes());
        EXPECT_TRUE(same_bytes(blocks.read(), want)) << "of the blocks";

        std::vector<std::byte> back(values.size());
        dequantize(bits, want, {dtype, back});
        OnDevice device_back(std::vector<std::byte>(back.size()), size_bytes(dtype));
        cuda::dequantize(nullptr, bits, blocks.bytes(), {dtype, device_back.bytes()});
        EXPECT_TRUE(same_bytes(device_back.read(), back)) << "of the values";

        HardFloats hard(32);
        std::vector<float> sums(count);
        std::ranges::generate(sums, [&] { return hard.next(); });
        OnDevice device_sums(sums, 1);
        cuda::add_dequantized(nullptr, bits, blocks.bytes(), device_sums.as<float>());
        add_dequantized(bits, want, sums);
        EXPECT_TRUE(same_bytes(device_sums.read(), bytes_of(sums))) << "of the sums";
        force_simd_target({});
      }
    }
  }
}

/// What comes from another rank: any bytes.
TEST_P(CudaQuantize, DequantizesAnyBytes) {
  const QuantizedBits bits = GetParam();
  std::mt19937 random(41);
  constexpr std::size_t kCount = 40 * kQuantizedBlock + 7;
  std::vector<std::byte> blocks(quantized_bytes(bits, kCount));
  for (std::byte& byte : blocks) byte = static_cast<std::byte>(random());
  OnDevice device_blocks(blocks, 1);
  OnDevice values(std::vector<float>(kCount), 0);
  cuda::dequantize(nullptr, bits, device_blocks.bytes(),
                   {DType::kBFloat16, values.bytes().first(kCount * sizeof(bf16))});
  std::vector<std::byte> want(kCount * sizeof(float));
  force_simd_target("scalar");
  dequantize(bits, blocks, {DType::kBFloat16, std::span(want).first(kCount * sizeof(bf16))});
  force_simd_target({});
  EXPECT_TRUE(same_bytes(values.read(), want));
}

INSTANTIATE_TEST_SUITE_P(Bits, CudaQuantize, ::testing::ValuesIn(kBoth), [](const auto& bits) {
  return bits.param == QuantizedBits::k8 ? "k8" : "k4";
});

}  // namespace
}  // namespace ziggurat::testing
