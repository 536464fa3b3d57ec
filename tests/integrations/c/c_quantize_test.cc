// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_quantize_test.cc: rows that travel in 8 or 4 bits through the C interface:
// where their codes are, in which order they are summed, and what is refused by name.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "integrations/c/ziggurat.hpp"

namespace ziggurat {
namespace c_quantize_test {

using ::testing::HasSubstr;

/// 8 bits: a scale and a byte an element in each block of 256.
constexpr std::uint64_t kCount = 70'000;  // several jobs, and half a block
constexpr std::uint64_t kBytes = kCount + 4 * 274;
constexpr std::uint8_t kGap = 0xa5;

class CQuantize : public ::testing::Test {
 protected:
  CQuantize() { EXPECT_EQ(ziggurat_runtime_create("{\"threads\": 2}", &runtime_), ZIGGURAT_OK); }
  ~CQuantize() override { EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK); }

  /// Encodes rows of floats, of which each has `stride_bytes` of its own.
  std::vector<std::uint8_t> encoded(std::uint32_t bits, std::vector<float>& values,
                                    std::uint64_t rows, std::uint64_t stride_bytes) {
    std::vector<std::uint8_t> codes(rows * stride_bytes, kGap);
    const ziggurat_memory its = memory_of(values);
    EXPECT_EQ(ziggurat_quantize(runtime_, bits, &its, rows, codes.data(), stride_bytes),
              ZIGGURAT_OK)
        << ziggurat_last_error();
    return codes;
  }
  std::vector<float> summed(std::uint32_t bits, const std::vector<std::uint8_t>& codes,
                            std::uint64_t rows, std::uint64_t stride_bytes, std::uint64_t count) {
    std::vector<float> sums(count, std::nanf(""));
    const ziggurat_memory its = memory_of(sums);
    EXPECT_EQ(ziggurat_sum_quantized(runtime_, bits, codes.data(), rows, stride_bytes, &its),
              ZIGGURAT_OK)
        << ziggurat_last_error();
    return sums;
  }

  ziggurat_runtime runtime_ = 0;
};

TEST_F(CQuantize, CodesTakeAScaleForEachBlockAndTheirBits) {
  std::uint64_t bytes = 0;
  EXPECT_EQ(ziggurat_quantized_bytes(8, kCount, &bytes), ZIGGURAT_OK);
  EXPECT_EQ(bytes, kBytes);
  EXPECT_EQ(ziggurat_quantized_bytes(4, 257, &bytes), ZIGGURAT_OK);
  EXPECT_EQ(bytes, 4 + 128 + 4 + 1U);
  EXPECT_EQ(ziggurat_quantized_bytes(8, 0, &bytes), ZIGGURAT_OK);
  EXPECT_EQ(bytes, 0U);
  EXPECT_EQ(ziggurat_quantized_bytes(5, 1, &bytes), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("bits is 5: give 8 or 4"));
  EXPECT_EQ(ziggurat_quantized_bytes(8, 1, nullptr), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("size_bytes"));
}

TEST_F(CQuantize, ARowComesBackWithinTheErrorOfItsBlocks) {
  std::vector<float> values(2 * kCount);
  for (std::uint64_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(static_cast<float>(i)) * static_cast<float>(1 + i / 256);
  constexpr std::uint64_t kStride = kBytes + 3;
  for (const std::uint32_t bits : {8U, 4U}) {
    std::vector<std::uint8_t> codes = encoded(bits, values, 2, kStride);
    EXPECT_EQ(codes[kStride - 1], kGap) << "between rows";
    EXPECT_EQ(codes[2 * kStride - 1], kGap) << "after the last";
    for (const std::uint64_t row : {0U, 1U}) {
      const std::vector<std::uint8_t> own(codes.begin() + row * kStride,
                                          codes.begin() + (row + 1) * kStride);
      const std::vector<float> back = summed(bits, own, 1, 0, kCount);
      const float part = bits == 8 ? 0.004F : 0.072F;
      for (std::uint64_t begin = 0; begin < kCount; begin += 256) {
        float largest = 0;
        for (std::uint64_t i = begin; i < std::min(kCount, begin + 256); ++i)
          largest = std::max(largest, std::abs(values[row * kCount + i]));
        for (std::uint64_t i = begin; i < std::min(kCount, begin + 256); ++i)
          ASSERT_NEAR(back[i], values[row * kCount + i], part * largest) << "element " << i;
      }
    }
  }
}

// Three values whose sum depends on the order; each is alone in its row, and so exact.
TEST_F(CQuantize, RowsAreSummedInTheirOrderInFp32) {
  const std::vector<float> of_rows{1e8F, 1.0F, -1e8F};
  std::vector<float> values;
  for (const float value : of_rows) values.insert(values.end(), kCount, value);
  const std::vector<std::uint8_t> codes = encoded(8, values, 3, kBytes);
  for (const float sum : summed(8, codes, 3, kBytes, kCount)) ASSERT_EQ(sum, 0.0F);
  std::vector<float> other;
  for (const float value : {1e8F, -1e8F, 1.0F}) other.insert(other.end(), kCount, value);
  for (const float sum : summed(8, encoded(8, other, 3, kBytes), 3, kBytes, kCount))
    ASSERT_EQ(sum, 1.0F);
  for (const float sum : summed(8, {}, 0, kBytes, 5)) EXPECT_EQ(sum, 0.0F) << "of no rows";
}

TEST_F(CQuantize, AValueThatIsNotFiniteMakesItsBlockNaN) {
  std::vector<float> values(600, 1.0F);
  values[300] = INFINITY;
  const std::vector<float> back = summed(8, encoded(8, values, 1, 700), 1, 700, 600);
  EXPECT_EQ(back[255], 1.0F);
  EXPECT_TRUE(std::isnan(back[256]) && std::isnan(back[511]));
  EXPECT_EQ(back[512], 1.0F);
}

TEST_F(CQuantize, NamesWhatIsWrong) {
  std::vector<float> values(10);
  std::vector<std::uint8_t> codes(100);
  const ziggurat_memory its = memory_of(values);
  const auto quantized = [&](std::uint32_t bits, std::uint64_t rows, void* to,
                             std::uint64_t stride) {
    EXPECT_EQ(ziggurat_quantize(runtime_, bits, &its, rows, to, stride), ZIGGURAT_INVALID_ARGUMENT);
    return std::string(ziggurat_last_error());
  };
  EXPECT_THAT(quantized(16, 1, codes.data(), 50), HasSubstr("bits is 16: give 8 or 4"));
  EXPECT_THAT(quantized(8, 3, codes.data(), 50), HasSubstr("rows is 3, but 10 values"));
  EXPECT_THAT(quantized(8, 0, codes.data(), 50), HasSubstr("rows is 0, but 10 values"));
  EXPECT_THAT(quantized(8, 2, codes.data(), 8),
              HasSubstr("stride_bytes is 8, but the codes of 5 elements take 9"));
  EXPECT_THAT(quantized(8, 1, nullptr, 50), HasSubstr("codes"));
  EXPECT_EQ(ziggurat_quantize(runtime_, 8, nullptr, 1, codes.data(), 50),
            ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("values"));
  EXPECT_EQ(ziggurat_quantize(runtime_ + 1, 8, &its, 1, codes.data(), 50),
            ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_EQ(ziggurat_sum_quantized(runtime_, 8, nullptr, 1, 50, &its), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("codes"));
  EXPECT_EQ(ziggurat_sum_quantized(runtime_, 8, codes.data(), 2, 13, &its),
            ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("stride_bytes is 13"));
  ziggurat_memory halves = its;
  halves.dtype = ZIGGURAT_BF16;
  EXPECT_EQ(ziggurat_sum_quantized(runtime_, 8, codes.data(), 1, 50, &halves),
            ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("sums"));
}

}  // namespace c_quantize_test
}  // namespace ziggurat
