// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/adamw_test.cc: AdamW gives one set of bits, and they are AdamW's.
#include "optimizer/adamw.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "optimizer/kernels.h"
#include "tests/optimizer/values.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

using testing::for_each_target;
using testing::from_bits;
using testing::HardFloats;
using testing::OffsetArray;
using testing::same_bits;
using testing::to_bits;

AdamWStep::Settings usual_settings() {
  return {.learning_rate = 6e-4f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .grad_scale = 0.37f,
          .t = 7};
}

/// Where in its cache line each array begins, in elements.
struct Offsets {
  std::size_t master = 0, exp_avg = 0, exp_avg_sq = 0, grad = 0, param = 0;
};

struct State {
  OffsetArray<float> master, exp_avg, exp_avg_sq;
  OffsetArray<bf16> grad, param;

  explicit State(std::size_t count, Offsets at = {})
      : master(count, at.master),
        exp_avg(count, at.exp_avg),
        exp_avg_sq(count, at.exp_avg_sq),
        grad(count, at.grad),
        param(count, at.param) {}

  void fill(std::uint32_t seed) {
    HardFloats values(seed);
    for (float& value : master.span()) value = values.next();
    for (float& value : exp_avg.span()) value = values.next();
    // Mostly what training has, now and then a negative one: the root of it is a new NaN.
    for (float& value : exp_avg_sq.span()) {
      value = values.word() % 16 == 0 ? values.next() : std::fabs(values.next());
    }
    for (bf16& value : grad.span()) value = float_to_bf16(values.next());
    std::ranges::fill(param.span(), bf16{0x1234});
  }
  void fill_like_training(std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : master.span()) value = 0.02f * normal(random);
    for (float& value : exp_avg.span()) value = 1e-3f * normal(random);
    for (float& value : exp_avg_sq.span()) value = 1e-6f * std::fabs(normal(random));
    for (bf16& value : grad.span()) value = float_to_bf16(1e-3f * normal(random));
  }
  void copy_from(State& other) {
    master.assign(other.master.span());
    exp_avg.assign(other.exp_avg.span());
    exp_avg_sq.assign(other.exp_avg_sq.span());
    grad.assign(other.grad.span());
    param.assign(other.param.span());
  }
  AdamWRecord record(std::size_t count) {
    return {master.first(count), exp_avg.first(count), exp_avg_sq.first(count), grad.first(count),
            param.first(count)};
  }
};

/// The first `changed` elements are those of `after`, the rest those of `before`.
void expect_prefix_updated(State& got, State& after, State& before, std::size_t changed) {
  const auto expect = [&](const char* name, auto& array, auto& updated, auto& original) {
    using T = typename std::remove_reference_t<decltype(array.span())>::element_type;
    const std::span<const T> values = array.span();
    EXPECT_TRUE(same_bits<T>(values.first(changed), updated.first(changed)))
        << name << " of " << changed << " elements differs from the specification";
    EXPECT_TRUE(same_bits<T>(values.subspan(changed), original.span().subspan(changed)))
        << name << " was written past element " << changed;
  };
  expect("master", got.master, after.master, before.master);
  expect("exp_avg", got.exp_avg, after.exp_avg, before.exp_avg);
  expect("exp_avg_sq", got.exp_avg_sq, after.exp_avg_sq, before.exp_avg_sq);
  expect("param", got.param, after.param, before.param);
}

void update_by_specification(const AdamWStep& step, State& state, std::size_t count,
                             float decay_factor) {
  internal::scalar::adamw(step, {.master = state.master.data(),
                                 .exp_avg = state.exp_avg.data(),
                                 .exp_avg_sq = state.exp_avg_sq.data(),
                                 .grad = state.grad.data(),
                                 .param = state.param.data(),
                                 .count = count,
                                 .decay_factor = decay_factor});
}

constexpr std::size_t kLargestOddSize = 4099;

TEST(AdamW, EveryTargetGivesTheSpecificationsBitsAtEverySizeAndAlignment) {
  const AdamWStep step = AdamWStep::make(usual_settings());
  State before(kLargestOddSize);
  before.fill(1);
  State after(kLargestOddSize);
  after.copy_from(before);
  update_by_specification(step, after, kLargestOddSize, step.decay_factor);

  for (const Offsets at : {Offsets{}, Offsets{1, 2, 3, 1, 5}, Offsets{15, 15, 15, 15, 31}}) {
    State got(kLargestOddSize, at);
    for_each_target([&] {
      for (std::size_t size = 0; size <= kLargestOddSize; ++size) {
        got.copy_from(before);
        const DecayRun whole{0, size, true};
        adamw_update(step, got.record(size), {&whole, 1});
        expect_prefix_updated(got, after, before, size);
        ASSERT_FALSE(::testing::Test::HasFailure()) << "size " << size;
      }
    });
  }
}

TEST(AdamW, StoresOneNaNWhateverNaNCameIn) {
  const AdamWStep step = AdamWStep::make(usual_settings());
  constexpr std::size_t kCount = 64;
  const DecayRun whole{0, kCount, true};
  for_each_target([&] {
    for (const std::uint32_t nan :
         {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fa12345u}) {
      for (int where = 0; where < 4; ++where) {
        State state(kCount);
        state.fill_like_training(1);
        for (std::size_t i = 0; i < kCount; ++i) {
          if (where == 0) state.master.data()[i] = from_bits(nan);
          if (where == 1) state.exp_avg.data()[i] = from_bits(nan);
          if (where == 2) state.exp_avg_sq.data()[i] = from_bits(nan);
          if (where == 3) state.grad.data()[i] = static_cast<bf16>((nan >> 16) | 1u);
        }
        adamw_update(step, state.record(kCount), {&whole, 1});
        for (std::size_t i = 0; i < kCount; ++i) {
          ASSERT_EQ(to_bits(state.master.data()[i]), internal::kNaNBits);
          ASSERT_EQ(state.param.data()[i], internal::kNaNBits >> 16);
          const bool m_is_nan = where == 1 || where == 3;
          const bool v_is_nan = where == 2 || where == 3;
          ASSERT_EQ(to_bits(state.exp_avg.data()[i]) == internal::kNaNBits, m_is_nan);
          ASSERT_EQ(to_bits(state.exp_avg_sq.data()[i]) == internal::kNaNBits, v_is_nan);
        }
      }
    }
  });
}

TEST(AdamW, KeepsDenormals) {
  const AdamWStep step = AdamWStep::make(usual_settings());
  const DecayRun whole{0, 40, false};
  for_each_target([&] {
    State state(40);
    for (std::size_t i = 0; i < 40; ++i) {
      state.master.data()[i] = from_bits(0x00012345);
      state.exp_avg.data()[i] = 0.0f;
      state.exp_avg_sq.data()[i] = from_bits(0x00000100);
      state.grad.data()[i] = 0;
    }
    adamw_update(step, state.record(40), {&whole, 1});
    for (std::size_t i = 0; i < 40; ++i) {
      ASSERT_EQ(to_bits(state.master.data()[i]), 0x00012345u);
      ASSERT_EQ(to_bits(state.exp_avg_sq.data()[i]), 0x000000f3u);  // 256 x 0.95 = 243.2
      ASSERT_EQ(state.param.data()[i], 0x0001);
    }
  });
}

TEST(AdamW, DecaysExactlyTheRunsThatSaySo) {
  const AdamWStep step = AdamWStep::make(usual_settings());
  constexpr std::size_t kCount = 3000;
  State before(kCount), decayed(kCount), kept(kCount), got(kCount);
  before.fill(2);
  decayed.copy_from(before);
  kept.copy_from(before);
  update_by_specification(step, decayed, kCount, step.decay_factor);
  update_by_specification(step, kept, kCount, 1.0f);

  const std::vector<DecayRun> runs = {{0, 1, false},     {1, 18, true},     {18, 18, false},
                                      {18, 777, false},  {777, 2048, true}, {2048, 2999, false},
                                      {2999, 3000, true}};
  for_each_target([&] {
    got.copy_from(before);
    adamw_update(step, got.record(kCount), runs);
    for (const DecayRun& run : runs) {
      State& want = run.decay ? decayed : kept;
      for (std::size_t i = run.begin; i < run.end; ++i) {
        ASSERT_EQ(to_bits(got.master.data()[i]), to_bits(want.master.data()[i])) << i;
        ASSERT_EQ(got.param.data()[i], want.param.data()[i]) << i;
      }
    }
  });
}

TEST(AdamW, EveryGroupHasItsOwnStep) {
  AdamWStep::Settings settings = usual_settings();
  StepScalars steps{AdamWStep::make(settings)};
  settings.learning_rate *= 0.5f;
  settings.beta1 = 0.5f;
  settings.weight_decay = 0.25f;
  steps.push_back(AdamWStep::make(settings));
  steps.push_back(AdamWStep::make(usual_settings()));
  steps.back().no_decay_factor = 0.5f;
  constexpr std::size_t kCount = 3000;
  const std::vector<DecayRun> runs = {
      {0, 1, true, 1}, {1, 777, false, 2}, {777, 2048, true, 0}, {2048, kCount, false, 1}};
  State before(kCount), want(kCount), got(kCount);
  before.fill(4);
  for_each_target([&] {
    got.copy_from(before);
    adamw_update(steps, got.record(kCount), runs);
    for (const DecayRun& run : runs) {
      const AdamWStep& step = steps[run.group];
      want.copy_from(before);
      update_by_specification(step, want, kCount,
                              run.decay ? step.decay_factor : step.no_decay_factor);
      for (std::size_t i = run.begin; i < run.end; ++i) {
        ASSERT_EQ(to_bits(got.master.data()[i]), to_bits(want.master.data()[i])) << i;
        ASSERT_EQ(to_bits(got.exp_avg.data()[i]), to_bits(want.exp_avg.data()[i])) << i;
      }
    }
  });
}

TEST(AdamW, AnEmptyRecordIsUpdated) { adamw_update(AdamWStep::make(usual_settings()), {}, {}); }

TEST(AdamWDeathTest, RunsMustCoverTheRecordInOrder) {
  State state(16);
  state.fill_like_training(1);
  const AdamWStep step = AdamWStep::make(usual_settings());
  const std::vector<DecayRun> short_run = {{0, 15, true}};
  const std::vector<DecayRun> hole = {{0, 4, true}, {5, 16, true}};
  EXPECT_DEATH(adamw_update(step, state.record(16), short_run), "runs cover 15 of 16");
  EXPECT_DEATH(adamw_update(step, state.record(16), hole),
               "run \\[5, 16\\) after a run that ended at 4");
  const std::vector<DecayRun> stranger = {{0, 16, true, 1}};
  EXPECT_DEATH(adamw_update(step, state.record(16), stranger), "a run of group 1, and 1 steps");
}

/// A record as it lies in memory: three arrays of whole tiles, one after the other.
struct TiledRecord {
  std::size_t count;
  OffsetArray<float> arrays;
  OffsetArray<bf16> grad, param;

  explicit TiledRecord(std::size_t tiles)
      : count(tiles * kTileElements), arrays(3 * count, 0), grad(count, 0), param(count, 0) {}
  void fill(std::uint32_t seed) {
    HardFloats values(seed);
    for (float& value : arrays.span()) value = values.next();
    for (bf16& value : grad.span()) value = float_to_bf16(values.next());
  }
  AdamWRecord record() {
    return {arrays.span().first(count), arrays.span().subspan(count, count),
            arrays.span().subspan(2 * count, count), grad.span(), param.span()};
  }
  std::span<const std::byte> bytes() { return std::as_bytes(arrays.span()); }
};

TEST(AdamWHashed, ChangesTheSameBitsAndHashesTheRecordBeforeAndAfter) {
  constexpr std::size_t kTiles = 3;
  constexpr std::size_t kCount = kTiles * kTileElements;
  AdamWStep::Settings other = usual_settings();
  other.learning_rate *= 0.5f;
  const StepScalars steps{AdamWStep::make(usual_settings()), AdamWStep::make(other)};
  const std::vector<DecayRun> runs = {
      {0, 100, true}, {100, kTileElements + 3, false, 1}, {kTileElements + 3, kCount, true}};
  TiledRecord before(kTiles), plain(kTiles), hashed(kTiles);
  before.fill(3);
  for_each_target([&] {
    for (const bool verify : {false, true}) {
      plain.arrays.assign(before.arrays.span());
      hashed.arrays.assign(before.arrays.span());
      plain.grad.assign(before.grad.span());
      hashed.grad.assign(before.grad.span());
      adamw_update(steps, plain.record(), runs);
      const RecordHashes hashes = adamw_update_hashed(
          steps, hashed.record(), runs, {.verify = verify, .seed_before = 11, .seed_after = 22});
      EXPECT_TRUE(same_bits<float>(hashed.arrays.span(), plain.arrays.span()));
      EXPECT_TRUE(same_bits<bf16>(hashed.param.span(), plain.param.span()));
      EXPECT_EQ(hashes.before, verify ? record_hash(before.bytes(), 11) : 0u);
      EXPECT_EQ(hashes.after, record_hash(plain.bytes(), 22));
    }
  });
}

TEST(AdamWHashed, OneChangedBitAnywhereChangesTheHashBefore) {
  const AdamWStep step = AdamWStep::make(usual_settings());
  TiledRecord record(2);
  const DecayRun whole{0, record.count, true};
  for (const std::size_t at :
       {std::size_t{0}, record.count - 1, record.count, 3 * record.count - 1}) {
    record.fill(4);
    const std::uint64_t sealed = record_hash(record.bytes(), 5);
    record.arrays.data()[at] = from_bits(to_bits(record.arrays.data()[at]) ^ 0x10u);
    const auto hashes = adamw_update_hashed(step, record.record(), {&whole, 1},
                                            {.verify = true, .seed_before = 5, .seed_after = 6});
    EXPECT_NE(hashes.before, sealed) << "element " << at;
  }
}

TEST(AdamWHashedDeathTest, WantsWholeTiles) {
  State state(100);
  const DecayRun whole{0, 100, true};
  EXPECT_DEATH(
      adamw_update_hashed(AdamWStep::make(usual_settings()), state.record(100), {&whole, 1},
                          {.verify = false, .seed_before = 0, .seed_after = 0}),
      "whole tiles");
}

TEST(AdamWStepScalars, AreTheTextbooks) {
  AdamWStep::Settings settings = usual_settings();
  for (const std::uint64_t t : {1u, 2u, 3u, 10u, 1000u, 1'000'000u}) {
    settings.t = t;
    const AdamWStep step = AdamWStep::make(settings);
    const double bias1 = 1 - std::pow(static_cast<double>(settings.beta1), static_cast<double>(t));
    const double bias2 = 1 - std::pow(static_cast<double>(settings.beta2), static_cast<double>(t));
    // One rounding to fp32 (6e-8), and powers that are good to 1e-12.
    EXPECT_NEAR(step.step_size / (settings.learning_rate / bias1), 1.0, 7e-8) << t;
    EXPECT_NEAR(step.inv_bias2_sqrt * std::sqrt(bias2), 1.0, 7e-8) << t;
    EXPECT_EQ(step.decay_factor, static_cast<float>(1.0 - double{6e-4f} * double{0.1f}));
  }
  EXPECT_EQ(AdamWStep::make(settings).step_size, settings.learning_rate);  // beta^1e6 is nothing
}

/// One parameter of Loshchilov & Hutter's Algorithm 2, in double.
struct TextbookAdamW {
  double w, m = 0, v = 0;
  void step(const AdamWStep::Settings& s, double gradient) {
    const double beta1 = s.beta1, beta2 = s.beta2, lr = s.learning_rate;
    const double g = gradient * s.grad_scale;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    const double m_hat = m / (1 - std::pow(beta1, static_cast<double>(s.t)));
    const double v_hat = v / (1 - std::pow(beta2, static_cast<double>(s.t)));
    w = w - lr * s.weight_decay * w - lr * m_hat / (std::sqrt(v_hat) + s.eps);
  }
};

TEST(AdamW, FollowsTheTextbookInDoubleForAThousandSteps) {
  constexpr std::size_t kCount = 97;
  constexpr int kSteps = 1000;
  constexpr std::uint32_t kSeed = 20;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  AdamWStep::Settings settings = usual_settings();
  settings.learning_rate = 1e-3f;
  State state(kCount);
  state.fill_like_training(kSeed);
  std::ranges::fill(state.exp_avg.span(), 0.0f);
  std::ranges::fill(state.exp_avg_sq.span(), 0.0f);
  std::vector<TextbookAdamW> textbook;
  for (const float w : state.master.span()) textbook.push_back({.w = w});

  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  const DecayRun whole{0, kCount, true};
  double largest = 0;
  for (int t = 1; t <= kSteps; ++t) {
    settings.t = static_cast<std::uint64_t>(t);
    for (std::size_t i = 0; i < kCount; ++i) {
      // A drift each element keeps, and noise: weights really move, up to about 0.7.
      const float drift = static_cast<float>(i % 7) - 3.0f;
      state.grad.data()[i] = float_to_bf16(0.01f * (drift + normal(random)));
      textbook[i].step(settings, static_cast<double>(bf16_to_float(state.grad.data()[i])));
      largest = std::max(largest, std::fabs(textbook[i].w));
    }
    adamw_update(AdamWStep::make(settings), state.record(kCount), {&whole, 1});
  }
  ASSERT_GT(largest, 0.3);
  // Per step: two roundings of the master and its decay factor's (3 half-ulps of |w|), and an
  // update of about lr whose relative error is some 32 half-ulps (moments carry 1/(1-beta)
  // roundings each). Worst case, all in one direction.
  const double half_ulp = 0x1p-24;
  const double tolerance = kSteps * half_ulp * (3 * largest + 32 * settings.learning_rate * 3);
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_NEAR(state.master.data()[i], textbook[i].w, tolerance) << i;
    EXPECT_NEAR(state.exp_avg.data()[i], textbook[i].m, 32 * half_ulp * 0.05) << i;
    EXPECT_NEAR(state.exp_avg_sq.data()[i] / textbook[i].v, 1.0, 64 * half_ulp) << i;
    EXPECT_EQ(state.param.data()[i], float_to_bf16(state.master.data()[i]));
  }
}

}  // namespace
}  // namespace ziggurat
