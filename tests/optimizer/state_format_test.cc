// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/state_format_test.cc: what a record of each format holds, and what goes together.
#include "optimizer/state_format.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "optimizer/state_values.h"
#include "tests/optimizer/state.h"

namespace ziggurat {
namespace state_format_test {

using ::testing::HasSubstr;
using testing::TiledRecord;

double bytes_per_param(OptimizerKind kind, StateFormat format) {
  return static_cast<double>(record_format(kind, format).tile_bytes()) / kTileElements;
}

TEST(StateFormat, HasTheBytesPerParameterOfItsTable) {
  const auto adam = [](StateFormat format) {
    return bytes_per_param(OptimizerKind::kAdamW, format);
  };
  EXPECT_EQ(adam(StateFormat::kFp32), 12);
  EXPECT_EQ(adam(StateFormat::kBf16Moments), 8);
  EXPECT_EQ(adam(StateFormat::k8Bit), 4 + 1 + 1 + 8.0 / 256);
  EXPECT_EQ(adam(StateFormat::kSplit), 12);
  EXPECT_EQ(adam(StateFormat::kBf16), 6);
  const auto lion = [](StateFormat format) {
    return bytes_per_param(OptimizerKind::kLion, format);
  };
  EXPECT_EQ(lion(StateFormat::kFp32), 8);
  EXPECT_EQ(lion(StateFormat::kBf16Moments), 6);
  EXPECT_EQ(lion(StateFormat::k8Bit), 4 + 1 + 4.0 / 256);
  EXPECT_EQ(lion(StateFormat::kSplit), 8);
  EXPECT_EQ(lion(StateFormat::kBf16), 4);
}

TEST(StateFormat, NamesItsArraysAsTheyLie) {
  EXPECT_EQ(record_format(OptimizerKind::kAdamW, StateFormat::kFp32).text(),
            "master fp32, exp_avg fp32, exp_avg_sq fp32");
  EXPECT_EQ(record_format(OptimizerKind::kAdam, StateFormat::kSplit).text(),
            "param bf16, residual 16-bit, exp_avg fp32, exp_avg_sq fp32");
  EXPECT_EQ(record_format(OptimizerKind::kAdamW, StateFormat::k8Bit).text(),
            "master fp32, exp_avg 8-bit, exp_avg_sq 8-bit, exp_avg scale fp32/256, "
            "exp_avg_sq scale fp32/256");
  EXPECT_EQ(record_format(OptimizerKind::kSgd, StateFormat::kBf16).text(),
            "param bf16, momentum_buffer bf16");
}

TEST(StateFormat, NamesAreReadAsTheyAreWritten) {
  for (const StateFormat format : testing::kAllFormats)
    EXPECT_EQ(parse_state_format(to_string(format)), format);
  EXPECT_EQ(parse_state_format("fp8"), std::nullopt);
}

TEST(StateFormat, GivesBackTheMastersItWasGivenAndBeginsWithMomentsOfZero) {
  for (const StateFormat format : testing::kAllFormats) {
    TiledRecord record(OptimizerKind::kAdamW, format, 2);
    std::vector<float> masters(record.count);
    testing::HardFloats values(3);
    for (float& value : masters) value = quiet(values.next());
    write_record(record.kind, format, masters, record.bytes());
    if (format == StateFormat::kBf16) {
      for (float& value : masters) value = bf16_to_float(float_to_bf16(value));
    }
    EXPECT_TRUE(testing::same_bits<float>(record.masters(), masters)) << to_string(format);

    std::ranges::fill(masters, 0.0f);
    write_record(record.kind, format, masters, record.bytes());
    const StateKind state{record.kind, format};
    std::vector<std::byte> zeros(record.bytes().size());
    for (std::size_t i = 0; i < state_names(record.kind).size(); ++i)
      write_state_values(state, i, masters, zeros);
    EXPECT_TRUE(std::ranges::equal(record.bytes(), zeros)) << to_string(format);
  }
}

TEST(StateFormat, GivesBackTheParametersOfTheStepThatMadeTheRecord) {
  for (const StateFormat format : testing::kAllFormats) {
    for (const Roundings& rounding : testing::roundings_of(format)) {
      TiledRecord record(OptimizerKind::kAdamW, format, 3);
      record.fill(8);
      OptimizerStep::Settings settings = testing::usual_settings();
      settings.rounding = rounding;
      RecordView view = record.view();
      view.first_element = 5 * kTileElements;
      DecayRun whole{0, record.count, true};
      if (rounding.state == rounding.params) whole.place = ParamPlace{.name = 77, .first = 12345};
      update_record(OptimizerStep::make(settings), view, {&whole, 1});
      std::vector<bf16> params(record.count);
      read_params(format, record.bytes(),
                  {.rounding = rounding.params, .seed = settings.seed, .step = settings.t},
                  view.first_element, {&whole, 1}, as_typed(std::span(params)));
      EXPECT_TRUE(testing::same_bits<bf16>(params, record.param.span())) << to_string(format);
    }
  }
}

TEST(StateFormat, TrafficLeavesOutAParameterThatIsInUseElsewhere) {
  const StateTraffic split = state_traffic({OptimizerKind::kAdamW, StateFormat::kSplit}, true);
  EXPECT_EQ(split.read, 10);
  EXPECT_EQ(split.written, 12);
  EXPECT_EQ(state_traffic({OptimizerKind::kAdamW, StateFormat::kSplit}, false).read, 12);
  EXPECT_EQ(state_traffic({OptimizerKind::kAdamW, StateFormat::kBf16}, true).read, 4);
  EXPECT_EQ(state_traffic({OptimizerKind::kAdamW, StateFormat::k8Bit}, true).read, 6.03125);
  EXPECT_EQ(state_traffic({OptimizerKind::kSgd, StateFormat::kFp32}, true).read, 8);
}

TEST(StateFormat, RefusesWhatDoesNotGoTogetherByName) {
  const auto refusal = [](StateFormat format, Rounding rounding, bool param_is_bf16) {
    try {
      require_compatible(format, rounding, param_is_bf16);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal(StateFormat::kSplit, Rounding::kStochastic, true), HasSubstr("stochastic"));
  EXPECT_THAT(refusal(StateFormat::kSplit, Rounding::kNearest, false), HasSubstr("'split'"));
  EXPECT_THAT(refusal(StateFormat::kBf16, Rounding::kStochastic, false), HasSubstr("'bf16'"));
  EXPECT_EQ(refusal(StateFormat::kBf16, Rounding::kStochastic, true), "");
  for (const StateFormat format :
       {StateFormat::kFp32, StateFormat::kBf16Moments, StateFormat::k8Bit})
    EXPECT_EQ(refusal(format, Rounding::kStochastic, false), "");
}

TEST(StateFormat, RoundingAMomentCostsWhatIsStated) {
  testing::HardFloats values(5);
  for (int i = 0; i < 10000; ++i) {
    const float value = values.next();
    if (!std::isnormal(value) || std::fabs(value) > 3e38f) continue;
    for (const std::uint32_t noise : {kNearestNoise, 0u, 0xffffu}) {
      const double error = std::fabs(double{bf16_to_float(round_with_noise(value, noise))} - value);
      ASSERT_LE(error, (noise == kNearestNoise ? 0x1p-8 : 0x1p-7) * std::fabs(value));
    }
  }
}

}  // namespace state_format_test
}  // namespace ziggurat
