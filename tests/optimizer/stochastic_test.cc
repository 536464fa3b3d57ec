// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/stochastic_test.cc: state in bf16 that is rounded stochastically follows its rule
// on average, each array by noise of its own, and a parameter's noise is its own wherever it lies.
#include "optimizer/rounding.h"

#include <cmath>
#include <numeric>
#include <random>

#include "base/checksum.h"
#include "optimizer/state_values.h"
#include "optimizer/xxh3.h"
#include "tests/optimizer/state.h"

namespace ziggurat {
namespace stochastic_test {

using testing::TiledRecord;

constexpr std::size_t kTiles = 4;  // 65,536 elements
constexpr Roundings kDefault{.state = Rounding::kStochastic};
constexpr std::array kBf16Formats = {StateFormat::kBf16Moments, StateFormat::kBf16};

double mean(std::span<const float> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}
double variance(std::span<const float> values) {
  const double middle = mean(values);
  double sum = 0;
  for (const float value : values)
    sum += (static_cast<double>(value) - middle) * (static_cast<double>(value) - middle);
  return sum / static_cast<double>(values.size());
}

std::vector<float> state_of(TiledRecord& record, std::size_t index) {
  std::vector<float> values(record.count);
  read_state_values({record.kind, record.format}, index, record.bytes(), values);
  return values;
}
void set_state(TiledRecord& record, std::size_t index, std::span<const float> values) {
  write_state_values({record.kind, record.format}, index, values, record.bytes());
}

/// Keeps a measured figure in the test's report (--gtest_output=xml:FILE).
void report(const std::string& name, StateFormat format, double value) {
  ::testing::Test::RecordProperty(name + " in " + std::string(to_string(format)),
                                  std::to_string(value));
}

/// `steps` steps of gradients of zero.
void step(TiledRecord& record, OptimizerStep::Settings settings, std::uint64_t steps) {
  std::ranges::fill(record.grad.span(), bf16{0});
  DecayRun whole{0, record.count, true};
  whole.place = ParamPlace{.name = 5};
  for (settings.t = 1; settings.t <= steps; ++settings.t)
    update_record(OptimizerStep::make(settings), record.view(), {&whole, 1});
}

OptimizerStep::Settings settings_for(Roundings rounding) {
  OptimizerStep::Settings settings = testing::usual_settings();
  settings.rounding = rounding;
  settings.beta2 = 0.999F;
  settings.weight_decay = 0;
  return settings;
}

/// Keys of stochastic rounding are made of it on every machine.
TEST(Noise, AWordsHashIsTheLibrarys) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t seed = i % 10 == 0 ? i : random();
    const std::uint64_t value = i % 3 == 0 ? i : random();
    ASSERT_EQ(internal::xxh3::hash_word(seed, value), mix_seed(seed, value))
        << seed << " " << value;
  }
}

TEST(StochasticState, ASecondMomentFallsAsItsRuleHasIt) {
  const double kept = std::pow(0.999, 1500);  // 0.223
  for (const StateFormat format : kBf16Formats) {
    TiledRecord record(OptimizerKind::kAdamW, format, kTiles);
    const std::vector<float> ones(record.count, 1.0F);
    set_state(record, 2, ones);
    step(record, settings_for(kDefault), 1500);
    const double fallen = mean(state_of(record, 2));
    report("second moment, rounded stochastically,", format, fallen);
    EXPECT_NEAR(fallen, kept, 0.02 * kept) << to_string(format);
    set_state(record, 2, ones);
    step(record, settings_for({}), 1500);
    const double stayed = mean(state_of(record, 2));
    report("second moment, rounded to nearest,", format, stayed);
    EXPECT_GT(stayed, 0.99) << to_string(format);
  }
}

TEST(StochasticState, SmallDecaysOfAMasterAddUp) {
  OptimizerStep::Settings settings = settings_for(kDefault);
  settings.learning_rate = 1e-3F;
  settings.weight_decay = 0.1F;
  const double kept = std::pow(1 - 1e-4, 400);  // 0.9608
  for (const StateFormat format : kBf16Formats) {
    TiledRecord record(OptimizerKind::kAdamW, format, kTiles);
    set_state(record, 0, std::vector<float>(record.count, 1.0F));
    for (const std::size_t moment : {1U, 2U})
      set_state(record, moment, std::vector<float>(record.count, 0.0F));
    step(record, settings, 400);
    const double decayed = mean(record.masters());
    report("master", format, decayed);
    EXPECT_NEAR(decayed, kept, 0x1p-8) << to_string(format);
  }
}

TEST(StochasticState, VarianceIsTheRules) {
  OptimizerStep::Settings settings = settings_for(kDefault);
  settings.learning_rate = 1e-3F;
  settings.weight_decay = 0.1F;
  for (const StateFormat format : kBf16Formats) {
    TiledRecord record(OptimizerKind::kAdamW, format, kTiles);
    TiledRecord exact(OptimizerKind::kAdamW, StateFormat::kFp32, kTiles);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> values(record.count);
    for (TiledRecord* of : {&record, &exact}) {
      random.seed(3);
      for (std::size_t index = 0; index < 3; ++index) {
        for (float& value : values) value = bf16_to_float(float_to_bf16(std::fabs(normal(random))));
        set_state(*of, index, values);
      }
      step(*of, settings, 400);
    }
    for (std::size_t index = 0; index < 3; index += 2) {
      const double want = variance(state_of(exact, index));
      const double found = variance(state_of(record, index));
      report("variance over the rule's, array " + std::to_string(index) + ",", format,
             found / want);
      EXPECT_NEAR(found, want, 0.1 * want) << "array " << index << " in " << to_string(format);
    }
  }
}

TEST(StochasticState, Fp32StateIsTheRuleExactly) {
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kSplit}) {
    TiledRecord record(OptimizerKind::kAdamW, format, 1);
    set_state(record, 2, std::vector<float>(record.count, 1.0F));
    step(record, settings_for(kDefault), 1500);
    float want = 1;
    for (int t = 0; t < 1500; ++t) want = 0.999F * want;
    EXPECT_EQ(state_of(record, 2), std::vector<float>(record.count, want)) << to_string(format);
  }
}

/// Whether rounding went up says nothing of whether that of another array of the element did.
TEST(StochasticState, EachArrayOfAnElementHasItsOwnNoise) {
  for (const StateFormat format : kBf16Formats) {
    for (const Rounding params : {Rounding::kNearest, Rounding::kStochastic}) {
      TiledRecord record(OptimizerKind::kAdamW, format, kTiles);
      const std::vector<float> values(record.count, 0.75F);
      for (std::size_t index = 0; index < 3; ++index) set_state(record, index, values);
      OptimizerStep::Settings settings = settings_for({Rounding::kStochastic, params});
      settings.beta1 = settings.beta2 = 0.998F;
      settings.learning_rate = 1e-2F;
      settings.weight_decay = 0.2F;
      settings.eps = 1e4F;
      step(record, settings, 1);
      std::vector<std::vector<float>> arrays{state_of(record, 1), state_of(record, 2)};
      if (format == StateFormat::kBf16 || params == Rounding::kStochastic) {
        arrays.emplace_back(record.count);
        for (std::size_t i = 0; i < record.count; ++i)
          arrays.back()[i] = bf16_to_float(record.param.data()[i]);
      }
      for (std::size_t a = 0; a < arrays.size(); ++a) {
        ASSERT_GT(variance(arrays[a]), 0) << a;
        for (std::size_t b = 0; b < a; ++b) {
          std::vector<float> sums(record.count);
          for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = arrays[a][i] + arrays[b][i];
          const double apart = variance(arrays[a]) + variance(arrays[b]);
          // Five standard deviations of the covariance of 65,536 pairs.
          EXPECT_NEAR(variance(sums), apart, 0.02 * apart) << a << " and " << b;
        }
      }
    }
  }
}

/// A record in `format`, all of one parameter from its element `first` on, after a step.
std::vector<bf16> stepped(const ParamPlace& place, std::size_t shift = 0) {
  TiledRecord record(OptimizerKind::kAdamW, StateFormat::kBf16, 2);
  for (std::size_t index = 0; index < 3; ++index)
    set_state(record, index, std::vector<float>(record.count, 0.75F));
  std::ranges::fill(record.grad.span(), bf16{0});
  OptimizerStep::Settings settings = settings_for(kDefault);
  settings.learning_rate = 1e-2F;
  settings.weight_decay = 0.2F;
  std::vector<DecayRun> runs{{0, shift, true}, {shift, record.count, true}};
  runs[0].place = ParamPlace{.name = 99};
  runs[1].place = place;
  RecordView view = record.view();
  view.first_element = shift * kTileElements;
  update_record(OptimizerStep::make(settings), view, runs);
  const std::span<bf16> made = record.param.span().subspan(shift);
  return {made.begin(), made.end()};
}

TEST(ParamNoise, IsOfTheNameAndTheElement) {
  const std::vector<bf16> whole = stepped({.name = 7});
  const std::vector<bf16> shifted = stepped({.name = 7}, 1001);
  EXPECT_TRUE(std::equal(shifted.begin(), shifted.end(), whole.begin()));
  const std::vector<bf16> later = stepped({.name = 7, .first = 5000});
  EXPECT_TRUE(std::equal(whole.begin() + 5000, whole.end(), later.begin()));
  EXPECT_NE(stepped({.name = 8}), whole);
}

TEST(ParamNoise, OfAPartIsThatOfTheWhole) {
  const std::vector<bf16> whole = stepped({.name = 7});
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    const ParamPlace place{.name = 7, .block = 50, .rank = rank, .ranks = 3};
    const std::vector<bf16> part = stepped(place);
    for (std::size_t i = 0; place.whole(i) < whole.size(); ++i) {
      ASSERT_EQ(place.whole(i), i / 50 * 150 + rank * 50 + i % 50);
      ASSERT_EQ(part[i], whole[place.whole(i)]) << i;
    }
  }
}

TEST(ParamNoise, OfALongParameterHasAKeyForEachPartOfIt) {
  const std::uint64_t end = ParamPlace::kOfKey;
  const std::vector<bf16> across = stepped({.name = 7, .first = end - 1000});
  const std::vector<bf16> behind = stepped({.name = 7, .first = end});
  EXPECT_TRUE(std::equal(across.begin() + 1000, across.end(), behind.begin()));
  EXPECT_NE(behind, stepped({.name = 7}));
}

}  // namespace stochastic_test
}  // namespace ziggurat
