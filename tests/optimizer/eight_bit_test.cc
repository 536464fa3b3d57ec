// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/eight_bit_test.cc: the codes are the published ones, encoding finds the nearest,
// and what that costs.
#include "optimizer/eight_bit.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/checksum.h"
#include "optimizer/eight_bit_tables.h"
#include "optimizer/update.h"
#include "tests/optimizer/state.h"

namespace ziggurat {
namespace eight_bit_test {

using testing::TiledRecord;
using testing::usual_settings;

constexpr std::array kCodes = {EightBitCode::kSigned, EightBitCode::kUnsigned};

/// The 256 values that create_dynamic_map(signed, 7, 8) of bitsandbytes gives under PyTorch 2.13,
/// by hash64 of their bytes.
TEST(EightBit, CodesAreThePublishedDynamicOnesBitForBit) {
  const auto hash = [](EightBitCode code) {
    return hash64(std::as_bytes(std::span(eight_bit_values(code))), 0);
  };
  EXPECT_EQ(hash(EightBitCode::kSigned), 0x8c54cbcb05904087u);
  EXPECT_EQ(hash(EightBitCode::kUnsigned), 0x7d7d467d7fbd8415u);
  const auto& with_sign = eight_bit_values(EightBitCode::kSigned);
  EXPECT_EQ(with_sign[127], 0.0f);
  EXPECT_EQ(with_sign[128], 5.5000004e-07f);
  EXPECT_EQ(with_sign[0], -with_sign[254]);
  EXPECT_EQ(with_sign[255], 1.0f);
  EXPECT_EQ(eight_bit_values(EightBitCode::kUnsigned)[1], 3.2500003e-07f);
}

/// `value`, which is at most 1, and 1 itself in one block: so the scale is 1.
std::uint8_t code_of(EightBitCode code, float value) {
  const float values[2] = {value, 1.0f};
  std::uint8_t codes[2];
  float scale = 0;
  encode_eight_bit(code, values, codes, &scale);
  EXPECT_EQ(scale, 1.0f);
  return codes[0];
}

std::vector<float> magnitudes() {
  std::vector<float> values;
  for (std::uint32_t bits = testing::to_bits(0x1p-26f); bits <= testing::to_bits(1.0f); bits += 997)
    values.push_back(testing::from_bits(bits));
  return values;
}

TEST(EightBit, EncodesToTheNearestCodeTheSmallerOfTwo) {
  for (const EightBitCode code : kCodes) {
    const auto& table = eight_bit_values(code);
    std::vector<float> values = magnitudes();
    for (std::size_t i = 0; i + 1 < table.size(); ++i) {  // half-way, and its neighbours
      const float middle = (table[i] + table[i + 1]) / 2;
      for (const float near : {std::nextafter(middle, -2.0f), middle, std::nextafter(middle, 2.0f)})
        values.push_back(near);
      values.push_back(table[i]);
    }
    for (const float magnitude : values) {
      for (const float value : {magnitude, -magnitude}) {
        if (code == EightBitCode::kUnsigned && value <= 0) continue;
        const auto distance = [&](float of) {
          return std::fabs(static_cast<double>(of) - static_cast<double>(value));
        };
        auto best = table[code == EightBitCode::kUnsigned ? 1 : 0];  // above zero never zero
        for (const float of : table) {
          if (code == EightBitCode::kUnsigned && of == 0) continue;
          const bool nearer = distance(of) < distance(best);
          if (nearer || (distance(of) == distance(best) && std::fabs(of) < std::fabs(best)))
            best = of;
        }
        ASSERT_EQ(table[code_of(code, value)], best) << value;
      }
    }
  }
}

/// The largest error of a value of at least `least`: absolute, or relative to itself.
double largest_error(EightBitCode code, double least, bool relative) {
  const auto& table = eight_bit_values(code);
  double largest = 0;
  for (std::size_t i = 0; i + 1 < table.size(); ++i) {
    const double middle = (double{table[i]} + double{table[i + 1]}) / 2;
    if (std::fabs(middle) < least) continue;
    const double error = (double{table[i + 1]} - double{table[i]}) / 2;
    largest = std::max(largest, relative ? error / std::fabs(middle) : error);
  }
  return largest;
}

TEST(EightBit, ErrorsAreAsTheHeaderSays) {
  const auto with_sign = [](double least, bool relative) {
    return largest_error(EightBitCode::kSigned, least, relative);
  };
  const auto without = [](double least, bool relative) {
    return largest_error(EightBitCode::kUnsigned, least, relative);
  };
  EXPECT_NEAR(with_sign(0, false), 0.0071, 0.0001);
  EXPECT_NEAR(without(0, false), 0.0036, 0.0001);
  EXPECT_NEAR(with_sign(0.1, true), 0.062, 0.001);
  EXPECT_NEAR(with_sign(0.01, true), 0.110, 0.001);
  EXPECT_NEAR(with_sign(0.001, true), 0.180, 0.001);
  EXPECT_NEAR(without(0.1, true), 0.033, 0.001);
  EXPECT_NEAR(without(0.01, true), 0.062, 0.001);
  EXPECT_NEAR(without(0.001, true), 0.110, 0.001);
  // -1 has no code of its own.
  EXPECT_NEAR(1 + eight_bit_values(EightBitCode::kSigned)[0], 0.0071, 0.0001);
  EXPECT_EQ(code_of(EightBitCode::kSigned, 2.7e-7f), 127);
  EXPECT_EQ(code_of(EightBitCode::kSigned, 2.8e-7f), 128);
}

TEST(EightBit, AboveZeroIsNeverZeroWithoutASign) {
  EXPECT_EQ(code_of(EightBitCode::kUnsigned, 1e-30f), 1);
  EXPECT_EQ(code_of(EightBitCode::kUnsigned, 0.0f), 0);
  EXPECT_EQ(code_of(EightBitCode::kUnsigned, -0.5f), 0);
  EXPECT_EQ(code_of(EightBitCode::kSigned, 1e-30f), 127);
}

TEST(EightBit, EachBlockHasItsScaleAndTheLastMayBeShort) {
  std::vector<float> values(2 * kEightBitBlock + 10);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float scale = i < 256 ? 1e-3f : i < 512 ? 40.0f : 1e-12f;
    values[i] = scale * static_cast<float>(static_cast<int>(i * 7 % 201) - 100) / 100.0f;
  }
  std::vector<std::uint8_t> codes(values.size());
  std::vector<float> scales(3), decoded(values.size());
  encode_eight_bit(EightBitCode::kSigned, values.data(), codes, scales.data());
  decode_eight_bit(EightBitCode::kSigned, codes, scales.data(), decoded.data());
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_NEAR(decoded[i], values[i], 0.0071 * scales[i / 256]) << i;
  const auto by_size = [](float a, float b) { return std::fabs(a) < std::fabs(b); };
  EXPECT_EQ(scales[0], 1e-3f);
  EXPECT_EQ(scales[1], 40.0f);
  EXPECT_EQ(scales[2], std::fabs(*std::max_element(values.begin() + 512, values.end(), by_size)));
}

TEST(EightBit, WhatHasNoCodeIsToldFromWhatIsZero) {
  std::vector<std::uint8_t> codes(kEightBitBlock);
  std::vector<float> decoded(kEightBitBlock);
  float scale = 0;
  for (const std::uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffffffffu}) {
    for (const EightBitCode code : kCodes) {
      std::vector<float> values(kEightBitBlock, 0.5f);
      values[77] = testing::from_bits(bits);
      encode_eight_bit(code, values.data(), codes, &scale);
      EXPECT_EQ(testing::to_bits(scale), kNaNBits);
      decode_eight_bit(code, codes, &scale, decoded.data());
      for (const float value : decoded) EXPECT_TRUE(std::isnan(value));
    }
  }
  const std::vector<float> denormals(kEightBitBlock, 1e-39f);
  encode_eight_bit(EightBitCode::kUnsigned, denormals.data(), codes, &scale);
  decode_eight_bit(EightBitCode::kUnsigned, codes, &scale, decoded.data());
  for (const float value : decoded) EXPECT_EQ(value, 0.0f);
}

/// Codes and scales as the specification makes them, from every target, and the values back.
void expect_specification(EightBitCode code, std::span<const float> values) {
  const std::size_t blocks = (values.size() + kEightBitBlock - 1) / kEightBitBlock;
  std::vector<std::uint8_t> want(values.size()), got(values.size());
  std::vector<float> want_scales(blocks), got_scales(blocks);
  std::vector<float> want_decoded(values.size()), decoded(values.size());
  internal::scalar::encode_eight_bit(code, values.data(), want, want_scales.data());
  internal::scalar::decode_eight_bit(code, want, want_scales.data(), want_decoded.data());
  testing::for_each_target([&] {
    std::ranges::fill(got, std::uint8_t{0x5a});
    encode_eight_bit(code, values.data(), got, got_scales.data());
    ASSERT_TRUE(testing::same_bits<float>(got_scales, want_scales)) << values.size();
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(int{got[i]}, int{want[i]})
          << values[i] << " of a block with " << got_scales[i / kEightBitBlock];
    decode_eight_bit(code, want, want_scales.data(), decoded.data());
    ASSERT_TRUE(testing::same_bits<float>(decoded, want_decoded)) << values.size();
  });
}

TEST(EightBit, EveryTargetGivesTheSpecificationsBitsAtEverySize) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  testing::HardFloats hard(4);
  std::vector<float> values(5 * kEightBitBlock + 10);
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (i / kEightBitBlock) {
      case 1: values[i] = hard.next(); break;  // becomes NaN
      case 2: values[i] = i % 3 == 0 ? 1e-39f : -0.0f; break;
      case 3: values[i] = 1e38f * normal(random); break;  // the inverse scale is denormal
      case 4: values[i] = std::ldexp(normal(random), -static_cast<int>(random() % 30)); break;
      default: values[i] = normal(random);
    }
  }
  for (const EightBitCode code : kCodes) {
    for (const std::size_t size : {0u, 1u, 255u, 256u, 257u, 512u, 1000u, 1024u, 1290u}) {
      for (const std::size_t offset : {0u, 1u}) {
        if (offset + size > values.size()) continue;
        expect_specification(code, std::span(values).subspan(offset, size));
        if (HasFailure()) return;
      }
    }
  }
}

TEST(EightBit, EveryTargetFindsTheNearestCodeBesideHalfWay) {
  for (const EightBitCode code : kCodes) {
    for (const float scale : {1.0f, 3e-7f, 1.9e20f}) {
      std::vector<float> values;
      for (const float threshold : internal::eight_bit_tables(code).thresholds) {
        const auto middle = static_cast<std::int32_t>(testing::to_bits(threshold));
        for (std::int32_t step = -300; step <= 300; ++step) {
          if (values.size() % kEightBitBlock == 0) values.push_back(scale);
          const float value = testing::from_bits(static_cast<std::uint32_t>(middle + step));
          values.push_back(scale * (step % 2 == 0 ? value : -value));
        }
      }
      // Everything between, a little of it.
      for (const float value : magnitudes()) {
        if (values.size() % kEightBitBlock == 0) values.push_back(scale);
        values.push_back(scale * value);
      }
      values.resize(values.size() / kEightBitBlock * kEightBitBlock);
      expect_specification(code, values);
      if (HasFailure()) return;
    }
  }
}

TEST(EightBit, EveryTargetDecodesEveryCode) {
  std::vector<std::uint8_t> codes(kEightBitBlock);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i * 37);
  for (const EightBitCode code : kCodes) {
    for (const std::uint32_t bits :
         {0x3f800000u, 0x00000000u, 0x00012345u, 0x7f7fffffu, 0x7f800000u, kNaNBits, 0x2b5a1234u}) {
      const float scale = testing::from_bits(bits);
      std::vector<float> want(codes.size()), got(codes.size());
      internal::scalar::decode_eight_bit(code, codes, &scale, want.data());
      testing::for_each_target([&] {
        decode_eight_bit(code, codes, &scale, got.data());
        for (std::size_t i = 0; i < codes.size(); ++i)
          ASSERT_TRUE(testing::to_bits(got[i]) == testing::to_bits(want[i]) ||
                      (got[i] != got[i] && want[i] != want[i]))
              << int{codes[i]} << " of " << scale;
      });
    }
  }
}

/// Any codes, scales and gradients: the bits of a record do not depend on the target.
TEST(EightBit, EveryTargetUpdatesARecordOfHardValuesAlike) {
  testing::HardFloats hard(9);
  const std::vector<DecayRun> runs = {
      {0, 1000, true}, {1000, 1010, false}, {1010, 4096, true}, {4096, kTileElements, false}};
  for (const OptimizerKind kind : testing::kAllOptimizers) {
    TiledRecord before(kind, StateFormat::k8Bit, 1), want(kind, StateFormat::k8Bit, 1);
    TiledRecord got(kind, StateFormat::k8Bit, 1);
    before.fill(3);
    const std::size_t moments = moment_count(kind);
    for (std::size_t i = before.shape.offset(1, 1); i < before.shape.offset(1 + moments, 1); ++i)
      before.bytes()[i] = static_cast<std::byte>(hard.word());
    auto* scales =
        reinterpret_cast<float*>(before.bytes().data() + before.shape.offset(1 + moments, 1));
    for (std::size_t i = 0; i < moments * kTileElements / kEightBitBlock; ++i) {
      if (i % 4 == 0) scales[i] = quiet(std::fabs(hard.next()));
    }
    for (std::size_t i = 0; i < kTileElements; ++i) {
      if (i / kEightBitBlock % 8 == 0) before.grad.data()[i] = float_to_bf16(hard.next());
    }
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic}) {
      OptimizerStep::Settings settings = usual_settings(kind);
      settings.rounding = {.state = rounding, .params = rounding};
      const OptimizerStep step = OptimizerStep::make(settings);
      want.copy_from(before);
      force_simd_target("scalar");
      update_record(step, want.view(), runs);
      testing::for_each_target([&] {
        got.copy_from(before);
        update_record(step, got.view(), runs);
        EXPECT_TRUE(testing::same_bits<std::byte>(got.bytes(), want.bytes())) << to_string(kind);
        EXPECT_TRUE(testing::same_bits<bf16>(got.param.span(), want.param.span()));
      });
    }
  }
}

/// update_record's way over 8-bit moments is decode, fp32's update, encode, whatever the target.
TEST(EightBit, ARecordIsUpdatedAsFp32BetweenDecodingAndEncoding) {
  for (const OptimizerKind kind : testing::kAllOptimizers) {
    SCOPED_TRACE(to_string(kind));
    const std::size_t moments = moment_count(kind);
    TiledRecord before(kind, StateFormat::k8Bit, 2), got(kind, StateFormat::k8Bit, 2);
    TiledRecord wide(kind, StateFormat::kFp32, 2);
    before.fill(8);
    std::ranges::copy(before.bytes().first(before.count * 4), wide.bytes().begin());
    wide.grad.assign(before.grad.span());
    const auto signs = [&](std::size_t k) {
      return k == 1 || kind == OptimizerKind::kAdagrad ? EightBitCode::kUnsigned
                                                       : EightBitCode::kSigned;
    };
    const auto codes = [&](TiledRecord& record, std::size_t k) {
      auto* at = reinterpret_cast<std::uint8_t*>(record.bytes().data());
      return std::span(at + record.shape.offset(1 + k, 2), record.count);
    };
    const auto scales = [&](TiledRecord& record, std::size_t k) {
      auto* at = record.bytes().data() + record.shape.offset(1 + moments + k, 2);
      return reinterpret_cast<float*>(at);
    };
    const auto values = [&](std::size_t k) {
      return reinterpret_cast<float*>(wide.bytes().data()) + (1 + k) * wide.count;
    };
    for (std::size_t k = 0; k < moments; ++k)
      decode_eight_bit(signs(k), codes(before, k), scales(before, k), values(k));
    const OptimizerStep step = OptimizerStep::make(usual_settings(kind));
    wide.update(step);

    testing::for_each_target([&] {
      got.copy_from(before);
      got.update(step);
      EXPECT_EQ(got.masters(), wide.masters());
      for (std::size_t k = 0; k < moments; ++k) {
        std::vector<std::uint8_t> want(got.count);
        std::vector<float> want_scales(got.count / kEightBitBlock);
        encode_eight_bit(signs(k), values(k), want, want_scales.data());
        EXPECT_TRUE(std::ranges::equal(codes(got, k), want));
        EXPECT_TRUE(std::equal(want_scales.begin(), want_scales.end(), scales(got, k)));
      }
    });
  }
}

}  // namespace eight_bit_test
}  // namespace ziggurat
