// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/variants_test.cc: what torch.optim's optimizers can be told beside their scalars:
// SGD's dampening and Nesterov's look ahead, the way up, and the sum that Adagrad begins with.
#include <gmock/gmock.h>

#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "optimizer/eight_bit.h"
#include "tests/optimizer/state.h"

namespace ziggurat {
namespace variants_test {

using testing::expect_specification;
using testing::for_each_target;
using ::testing::HasSubstr;
using testing::kLargestOddSize;
using testing::same_bits;
using testing::State;
using testing::TiledRecord;
using testing::usual_settings;

struct Variant {
  const char* name;
  float momentum = 0.9F;
  float dampening = 0;
  bool nesterov = false;
  bool maximize = false;
  std::uint64_t t = 7;
};

OptimizerStep::Settings settings_of(const Variant& its) {
  OptimizerStep::Settings settings = usual_settings(OptimizerKind::kSgd);
  settings.beta1 = its.momentum;
  settings.dampening = its.dampening;
  settings.nesterov = its.nesterov;
  settings.maximize = its.maximize;
  settings.t = its.t;
  return settings;
}

class SgdVariant : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(
    Variants, SgdVariant,
    ::testing::Values(Variant{.name = "dampened", .dampening = 0.3F},
                      Variant{.name = "nesterov", .nesterov = true},
                      Variant{
                          .name = "all", .dampening = -0.7F, .nesterov = true, .maximize = true},
                      Variant{.name = "first", .dampening = 0.3F, .nesterov = true, .t = 1},
                      Variant{.name = "plain", .momentum = 0, .dampening = 0.3F, .nesterov = true}),
    [](const auto& of) { return std::string(of.param.name); });

TEST_P(SgdVariant, GivesTheSpecificationsBitsInEveryFormatAndType) {
  for (const StateFormat format : testing::kKernelFormats) {
    for (const Roundings& rounding : testing::roundings_of(format)) {
      OptimizerStep::Settings settings = settings_of(GetParam());
      settings.rounding = rounding;
      const OptimizerStep step = OptimizerStep::make(settings);
      for (const DType grad : testing::kAllTypes) {
        const DType param = holds_param(format) ? DType::kBFloat16 : grad;
        SCOPED_TRACE(::testing::Message() << to_string(format) << ", " << to_string(grad));
        expect_specification(step, {OptimizerKind::kSgd, format, grad, param});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(SgdVariant, GivesOneRecordInEightBitsOnEveryTarget) {
  TiledRecord before(OptimizerKind::kSgd, StateFormat::k8Bit, 1);
  TiledRecord want(OptimizerKind::kSgd, StateFormat::k8Bit, 1);
  TiledRecord got(OptimizerKind::kSgd, StateFormat::k8Bit, 1);
  before.fill(3);
  testing::HardFloats hard(9);
  for (std::size_t i = 0; i < before.count; ++i) {
    if (i / kEightBitBlock % 4 == 0) before.grad.data()[i] = float_to_bf16(hard.next());
  }
  const OptimizerStep step = OptimizerStep::make(settings_of(GetParam()));
  want.copy_from(before);
  force_simd_target("scalar");
  want.update(step);
  for_each_target([&] {
    got.copy_from(before);
    got.update(step);
    EXPECT_TRUE(same_bits<std::byte>(got.bytes(), want.bytes()));
    EXPECT_TRUE(same_bits<bf16>(got.param.span(), want.param.span()));
  });
}

/// An element's master and momentum after a step of the formula, in the order that is specified.
struct Sgd {
  float master, momentum;
};
Sgd by_the_formula(const Variant& its, float lr, float g, Sgd old) {
  const float kept = its.momentum * old.momentum;
  const bool undamped = its.t == 1 || its.momentum == 0;
  const float momentum = kept + (undamped ? g : (1.0F - its.dampening) * g);
  const bool looks_ahead = its.nesterov && its.momentum != 0;
  const float direction = looks_ahead ? g + its.momentum * momentum : momentum;
  return {quiet(old.master - direction * lr), quiet(momentum)};
}

// NaN, inf and denormals too. With nothing asked for, the formula is plain momentum's: no product
// with a weight of 1 or 0 shows.
TEST(SgdVariants, HaveTheBitsOfTheFormula) {
  for (const Variant& its : {Variant{.name = "off"}, Variant{.name = "off", .momentum = 0},
                             Variant{.name = "dampened", .dampening = 0.25F},
                             Variant{.name = "first", .dampening = 0.25F, .t = 1},
                             Variant{.name = "plain", .momentum = 0, .dampening = 0.25F},
                             Variant{.name = "nesterov", .nesterov = true}}) {
    SCOPED_TRACE(its.name);
    OptimizerStep::Settings settings = settings_of(its);
    settings.grad_scale = 1;
    const OptimizerStep step = OptimizerStep::make(settings);
    State before(kLargestOddSize, {.kind = OptimizerKind::kSgd, .grad = DType::kFloat32});
    before.fill(4);
    State got(kLargestOddSize, before.shape);
    for_each_target([&] {
      got.copy_from(before);
      internal::update(step, got.slice(kLargestOddSize, settings.weight_decay));
      for (std::size_t i = 0; i < kLargestOddSize; ++i) {
        const float master = before.master.data()[i];
        const float g = before.grad32.data()[i] + master * settings.weight_decay;
        const Sgd want =
            by_the_formula(its, settings.learning_rate, g, {master, before.moments32[0].data()[i]});
        ASSERT_EQ(testing::to_bits(got.master.data()[i]), testing::to_bits(want.master)) << i;
        ASSERT_EQ(testing::to_bits(got.moments32[0].data()[i]), testing::to_bits(want.momentum))
            << i;
      }
    });
  }
}

TEST(SgdVariants, DampAllButTheFirstGradient) {
  Variant its{.name = "dampened", .dampening = 0.25F, .nesterov = true};
  EXPECT_EQ(OptimizerStep::make(settings_of(its)).gradient_weight, 0.75F);
  EXPECT_TRUE(OptimizerStep::make(settings_of(its)).nesterov);
  its.t = 1;
  EXPECT_EQ(OptimizerStep::make(settings_of(its)).gradient_weight, 1.0F);
  its = {.name = "plain", .momentum = 0, .dampening = 0.25F, .nesterov = true};
  EXPECT_EQ(OptimizerStep::make(settings_of(its)).gradient_weight, 1.0F);
  EXPECT_FALSE(OptimizerStep::make(settings_of(its)).nesterov);
}

class EveryOptimizerUp : public ::testing::TestWithParam<OptimizerKind> {};
INSTANTIATE_TEST_SUITE_P(Variants, EveryOptimizerUp, ::testing::ValuesIn(testing::kAllOptimizers),
                         [](const auto& of) { return std::string(to_string(of.param)); });

TEST_P(EveryOptimizerUp, MakesTheStepOfTheOppositeGradient) {
  for (const StateFormat format : testing::kAllFormats) {
    TiledRecord up(GetParam(), format, 2), down(GetParam(), format, 2),
        other(GetParam(), format, 2);
    for (TiledRecord* record : {&up, &down, &other}) record->fill(6);
    for (bf16& value : down.grad.span()) value ^= 0x8000U;
    OptimizerStep::Settings settings = usual_settings(GetParam());
    down.update(OptimizerStep::make(settings));
    other.update(OptimizerStep::make(settings));
    settings.maximize = true;
    up.update(OptimizerStep::make(settings));
    EXPECT_TRUE(same_bits<std::byte>(up.bytes(), down.bytes())) << to_string(format);
    EXPECT_TRUE(same_bits<bf16>(up.param.span(), down.param.span())) << to_string(format);
    EXPECT_FALSE(same_bits<bf16>(up.param.span(), other.param.span())) << to_string(format);
  }
}

/// Adagrad's sums in a record of one tile, widened.
std::vector<float> sums_of(TiledRecord& record) {
  const std::size_t index = record.format == StateFormat::kSplit ? 2 : 1;
  const std::byte* const at = record.bytes().data() + record.shape.offset(index, 1);
  std::vector<float> sums(record.count);
  if (record.format == StateFormat::k8Bit) {
    const std::byte* const scales = record.bytes().data() + record.shape.offset(index + 1, 1);
    decode_eight_bit(EightBitCode::kUnsigned,
                     {reinterpret_cast<const std::uint8_t*>(at), record.count},
                     reinterpret_cast<const float*>(scales), sums.data());
    return sums;
  }
  for (std::size_t i = 0; i < record.count; ++i) {
    sums[i] = internal::moment_bytes(record.format) == 2
                  ? bf16_to_float(reinterpret_cast<const bf16*>(at)[i])
                  : reinterpret_cast<const float*>(at)[i];
  }
  return sums;
}

TEST(InitialAccumulator, IsEverySumOfANewRecordAndNothingElse) {
  for (const StateFormat format : testing::kAllFormats) {
    SCOPED_TRACE(to_string(format));
    for (const float value : {0.1F, 1.0F, 1e30F, 1e-37F}) {
      TiledRecord record(OptimizerKind::kAdagrad, format, 1);
      TiledRecord zero(OptimizerKind::kAdagrad, format, 1);
      std::vector<float> masters(record.count);
      for (std::size_t i = 0; i < masters.size(); ++i) masters[i] = 0.01F * static_cast<float>(i);
      write_record(record.kind, format, masters, record.bytes(), value);
      write_record(zero.kind, format, masters, zero.bytes());
      EXPECT_EQ(record.masters(), zero.masters());
      const bool rounds = internal::moment_bytes(format) == 2;
      const float want = rounds ? bf16_to_float(float_to_bf16(value)) : value;
      EXPECT_THAT(sums_of(record), ::testing::Each(want));
      EXPECT_THAT(sums_of(zero), ::testing::Each(0.0F));
    }
  }
}

TEST(InitialAccumulator, IsWhatTheFirstSquareIsAddedTo) {
  TiledRecord record(OptimizerKind::kAdagrad, StateFormat::kFp32, 1);
  const std::vector<float> masters(record.count, 1.0F);
  write_record(record.kind, record.format, masters, record.bytes(), 0.75F);
  for (bf16& value : record.grad.span()) value = float_to_bf16(0.5F);
  OptimizerStep::Settings settings = usual_settings(OptimizerKind::kAdagrad);
  settings.learning_rate = 0.25F;
  settings.weight_decay = settings.eps = 0;
  settings.grad_scale = 1;
  record.update(OptimizerStep::make(settings));
  EXPECT_THAT(sums_of(record), ::testing::Each(1.0F));
  EXPECT_THAT(record.masters(), ::testing::Each(1.0F - 0.125F));
}

TEST(InitialAccumulator, IsRefusedByNameWhereItIsNone) {
  const auto refusal = [](OptimizerKind kind, float value) {
    try {
      require_initial_accumulator(kind, value);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  for (const OptimizerKind kind : testing::kAllOptimizers) EXPECT_EQ(refusal(kind, 0), "");
  EXPECT_EQ(refusal(OptimizerKind::kAdagrad, 0.1F), "");
  EXPECT_THAT(refusal(OptimizerKind::kSgd, 0.1F), HasSubstr("the optimizer is sgd"));
  for (const float value : {-1.0F, 2e30F, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_THAT(refusal(OptimizerKind::kAdagrad, value), HasSubstr("from 0 to 1e+30"));
}

}  // namespace variants_test
}  // namespace ziggurat
