// SPDX-License-Identifier: Apache-2.0
// tests/collectives/quantize/quantize_test.cc: 8- and 4-bit blocks: errors within their bounds, the
// same bits on every target at every size and start, and what becomes of values that are not
// finite.
#include "collectives/quantize/quantize.h"

#include <algorithm>
#include <cmath>

#include "base/numerics/float16.h"
#include "tests/support/hard_floats.h"

namespace ziggurat {
namespace quantize_test {

using testing::for_each_target;
using testing::HardFloats;
using testing::OffsetArray;

constexpr QuantizedBits kBoth[] = {QuantizedBits::k8, QuantizedBits::k4};
constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

std::vector<float> ordinary(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = 0.02f * normal(random);
  return values;
}

std::vector<float> round_trip(QuantizedBits bits, std::span<const float> values) {
  std::vector<std::byte> blocks(quantized_bytes(bits, values.size()));
  quantize(bits, as_typed(values), blocks);
  std::vector<float> back(values.size());
  dequantize(bits, blocks, as_typed(std::span(back)));
  return back;
}

/// A typed array of hard values, or as many as fit the type.
std::vector<std::byte> typed(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * size_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bf16 half =
        dtype == DType::kBFloat16 ? float_to_bf16(values[i]) : float_to_fp16(values[i]);
    if (dtype == DType::kFloat32)
      std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    else
      std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

TEST(Quantize, SizesCountScalesAndWholeBytes) {
  EXPECT_EQ(quantized_bytes(QuantizedBits::k8, 0), 0u);
  EXPECT_EQ(quantized_bytes(QuantizedBits::k8, 256), 260u);
  EXPECT_EQ(quantized_bytes(QuantizedBits::k8, 257), 260u + 5);
  EXPECT_EQ(quantized_bytes(QuantizedBits::k4, 256), 132u);
  EXPECT_EQ(quantized_bytes(QuantizedBits::k4, 512 + 3), 264u + 4 + 2);
}

TEST(Quantize, TheLayoutIsWhatTheHeaderSays) {
  const std::vector<float> values{1.0f, -1.0f, 0.5f, 0.0f, -0.25f};
  std::vector<std::byte> bytes(quantized_bytes(QuantizedBits::k8, 5));
  quantize(QuantizedBits::k8, as_typed(std::span(values)), bytes);
  float scale = 0;
  std::memcpy(&scale, bytes.data(), 4);
  EXPECT_EQ(scale, 1.0f);
  const int expected[] = {127, -127, 64, 0, -32};  // 63.5 and -31.75: ties to even, nearest
  for (std::size_t i = 0; i < 5; ++i)
    EXPECT_EQ(static_cast<int>(static_cast<std::int8_t>(bytes[4 + i])), expected[i]) << i;

  std::vector<std::byte> nibbles(quantized_bytes(QuantizedBits::k4, 5));
  quantize(QuantizedBits::k4, as_typed(std::span(values)), nibbles);
  // Elements 0 and 3, 1 and 4, 2 and none: codes 7 and 0, -7 and -2, 4 (3.5, even).
  EXPECT_EQ(nibbles[4], std::byte{0x8f});
  EXPECT_EQ(nibbles[5], std::byte{0x61});
  EXPECT_EQ(nibbles[6], std::byte{0x8c});
}

TEST(Quantize, AnErrorIsAtMostHalfAStep) {
  for (const QuantizedBits bits : kBoth) {
    for (const float magnitude : {1e-30f, 1e-3f, 1.0f, 1e30f}) {
      std::vector<float> values = ordinary(64 * kQuantizedBlock + 100, 11);
      for (float& value : values) value *= magnitude;
      const std::vector<float> back = round_trip(bits, values);
      for (std::size_t begin = 0; begin < values.size(); begin += kQuantizedBlock) {
        const std::size_t end = std::min(begin + kQuantizedBlock, values.size());
        double largest = 0;
        for (std::size_t i = begin; i < end; ++i)
          largest = std::max(largest, std::abs(static_cast<double>(values[i])));
        const double bound = largest * quantization_error(bits);
        for (std::size_t i = begin; i < end; ++i) {
          const double error =
              std::abs(static_cast<double>(values[i]) - static_cast<double>(back[i]));
          ASSERT_LE(error, bound);
        }
      }
    }
  }
}

TEST(Quantize, TheLargestComesBackAndZeroIsZero) {
  for (const QuantizedBits bits : kBoth) {
    std::vector<float> values = ordinary(kQuantizedBlock, 12);
    values[17] = -3.75f;
    values[18] = 0.0f;
    const std::vector<float> back = round_trip(bits, values);
    EXPECT_EQ(back[17], -3.75f);
    EXPECT_EQ(back[18], 0.0f);
  }
}

/// What comes from another rank: a NaN becomes the one that is stored, also of an infinite scale.
TEST(Quantize, EveryTargetDequantizesAnyBytesAlike) {
  constexpr std::size_t kCount = 8 * kQuantizedBlock;
  std::mt19937 random(19);
  for (const QuantizedBits bits : kBoth) {
    std::vector<std::byte> blocks(quantized_bytes(bits, kCount));
    for (std::byte& byte : blocks) byte = static_cast<std::byte>(random());
    const std::array<std::uint32_t, 5> scales = {0x7f800001, 0xffc12345, 0x7f800000, 0xff800000,
                                                 0x7fc00000};
    for (std::size_t b = 0; b < scales.size(); ++b)
      std::memcpy(blocks.data() + b * quantized_bytes(bits, kQuantizedBlock), &scales[b], 4);
    for (const DType dtype : kTypes) {
      std::vector<std::byte> want;
      for_each_target([&] {
        std::vector<std::byte> values(kCount * size_bytes(dtype));
        dequantize(bits, blocks, {dtype, values});
        if (want.empty()) want = values;
        EXPECT_EQ(values, want) << to_string(dtype);
        if (dtype != DType::kFloat32) return;
        std::uint32_t first = 0;
        std::memcpy(&first, values.data(), 4);
        EXPECT_EQ(first, 0x7fc00000u);
      });
    }
  }
}

TEST(Quantize, EveryTargetGivesTheSpecificationsBitsAtEverySizeAndStart) {
  constexpr std::size_t kMost = 3 * kQuantizedBlock + 41;
  HardFloats hard(13);
  std::vector<float> values(kMost);
  for (float& value : values) value = hard.next();
  // A block without special values, so that not everything is NaN.
  std::ranges::copy(ordinary(kQuantizedBlock, 14), values.begin() + kQuantizedBlock);
  for (const QuantizedBits bits : kBoth) {
    for (const DType dtype : kTypes) {
      const std::vector<std::byte> source = typed(dtype, values);
      const auto run = [&](std::size_t count, std::size_t offset) {
        const std::size_t size = count * size_bytes(dtype);
        OffsetArray<std::byte> from(size, offset);
        from.assign(std::span(source).first(size));
        OffsetArray<std::byte> blocks(quantized_bytes(bits, count), offset + 3);
        OffsetArray<std::byte> back(size, offset);
        quantize(bits, {dtype, from.span()}, blocks.span());
        dequantize(bits, blocks.span(), {dtype, back.span()});
        std::vector<std::byte> all(blocks.span().begin(), blocks.span().end());
        all.insert(all.end(), back.span().begin(), back.span().end());
        return all;
      };
      for (const std::size_t count : {0u, 1u, 7u, 255u, 256u, 257u, 512u, 700u, 809u}) {
        force_simd_target("scalar");
        const std::vector<std::byte> expected = run(count, 0);
        for_each_target([&] {
          for (const std::size_t offset : {0u, 1u, 2u, 5u, 32u})
            ASSERT_EQ(run(count, offset), expected)
                << to_string(dtype) << ", " << count << " from " << offset;
        });
      }
    }
  }
}

// That is why any thread may do any run of blocks.
TEST(Quantize, ABlockDependsOnItsOwnValuesOnly) {
  const std::vector<float> values = ordinary(5 * kQuantizedBlock, 15);
  for (const QuantizedBits bits : kBoth) {
    const std::size_t block_bytes = quantized_bytes(bits, kQuantizedBlock);
    std::vector<std::byte> all(quantized_bytes(bits, values.size()));
    quantize(bits, as_typed(std::span(values)), all);
    for (std::size_t b = 0; b < 5; ++b) {
      std::vector<std::byte> one(block_bytes);
      quantize(bits, as_typed(std::span(values).subspan(b * kQuantizedBlock, kQuantizedBlock)),
               one);
      EXPECT_TRUE(std::equal(one.begin(), one.end(),
                             all.begin() + static_cast<std::ptrdiff_t>(b * block_bytes)));
    }
  }
}

TEST(Quantize, ABlockThatIsNotFiniteIsNanAndItsNeighboursAreNot) {
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const QuantizedBits bits : kBoth) {
      std::vector<float> values = ordinary(3 * kQuantizedBlock, 16);
      values[kQuantizedBlock + 9] = bad;
      for_each_target([&] {
        const std::vector<float> back = round_trip(bits, values);
        for (std::size_t i = 0; i < back.size(); ++i)
          ASSERT_EQ(std::isnan(back[i]), i / kQuantizedBlock == 1) << i;
      });
    }
  }
}

TEST(Quantize, DenormalsBecomeZeroAndTheEndsOfTheRangeDoNotOverflow) {
  for (const QuantizedBits bits : kBoth) {
    std::vector<float> tiny(kQuantizedBlock, 1e-39f);
    for (const float value : round_trip(bits, tiny)) ASSERT_EQ(value, 0.0f);
    std::vector<float> huge(kQuantizedBlock, std::numeric_limits<float>::max());
    EXPECT_EQ(round_trip(bits, huge), huge);
    std::vector<float> least(kQuantizedBlock, std::numeric_limits<float>::min());
    EXPECT_EQ(round_trip(bits, least), least);
  }
}

TEST(Quantize, AddingIsDecodingAndAdding) {
  constexpr std::size_t kCount = 4 * kQuantizedBlock + 33;
  std::vector<float> values = ordinary(kCount, 17);
  values[5] = std::numeric_limits<float>::infinity();
  const std::vector<float> start = ordinary(kCount, 18);
  for (const QuantizedBits bits : kBoth) {
    std::vector<std::byte> blocks(quantized_bytes(bits, kCount));
    quantize(bits, as_typed(std::span(values)), blocks);
    const std::vector<float> decoded = round_trip(bits, values);
    for_each_target([&] {
      OffsetArray<float> sums(kCount, 3);
      sums.assign(start);
      add_dequantized(bits, blocks, sums.span());
      for (std::size_t i = 0; i < kCount; ++i) {
        const float sum = start[i] + decoded[i];
        ASSERT_EQ(testing::to_bits(sums.data()[i]),
                  std::isnan(sum) ? 0x7fc00000u : testing::to_bits(sum));
      }
    });
  }
}

TEST(QuantizeDeathTest, WantsBytesThatFit) {
  const std::vector<float> values(4);
  std::vector<std::byte> blocks(9);
  EXPECT_DEATH(quantize(QuantizedBits::k8, as_typed(std::span(values)), blocks),
               "9 bytes do not hold exactly 4 elements of 8 bits");
}

}  // namespace quantize_test
}  // namespace ziggurat
