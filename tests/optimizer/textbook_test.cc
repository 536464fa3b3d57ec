// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/textbook_test.cc: the optimizers against the papers' formulas in double, for a
// thousand steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/optimizer/state.h"

namespace ziggurat {
namespace textbook_test {

using testing::State;
using testing::usual_settings;

TEST(StepScalars, AreTheTextbooks) {
  OptimizerStep::Settings settings = usual_settings();
  for (const std::uint64_t t : {1u, 2u, 3u, 10u, 1000u, 1'000'000u}) {
    settings.t = t;
    const OptimizerStep step = OptimizerStep::make(settings);
    const double bias1 = 1 - std::pow(static_cast<double>(settings.beta1), static_cast<double>(t));
    const double bias2 = 1 - std::pow(static_cast<double>(settings.beta2), static_cast<double>(t));
    // One rounding to fp32 (6e-8), and powers that are good to 1e-12.
    EXPECT_NEAR(step.step_size / (settings.learning_rate / bias1), 1.0, 7e-8) << t;
    EXPECT_NEAR(step.inv_bias2_sqrt * std::sqrt(bias2), 1.0, 7e-8) << t;
    EXPECT_EQ(step.decay, static_cast<float>(1.0 - double{6e-4f} * double{0.1f}));
    EXPECT_EQ(step.no_decay, 1.0f);
  }
  EXPECT_EQ(OptimizerStep::make(settings).step_size,
            settings.learning_rate);  // beta^1e6 is nothing
  for (const auto kind : {OptimizerKind::kAdam, OptimizerKind::kAdagrad, OptimizerKind::kSgd}) {
    const OptimizerStep penalty = OptimizerStep::make(usual_settings(kind));
    EXPECT_EQ(penalty.decay, 0.1f);
    EXPECT_EQ(penalty.no_decay, 0.0f);
  }
}

TEST(OptimizerNames, AreReadAsTheyAreWritten) {
  for (const OptimizerKind kind : testing::kAllOptimizers)
    EXPECT_EQ(parse_optimizer(to_string(kind)), kind);
  EXPECT_EQ(parse_optimizer("adamW"), std::nullopt);
}

/// One parameter, as its paper or torch.optim has it, in double.
struct Textbook {
  double w;
  double m = 0, v = 0;

  void step(const OptimizerStep::Settings& s, double gradient) {
    const double beta1 = s.beta1, beta2 = s.beta2, lr = s.learning_rate, decay = s.weight_decay;
    double g = (s.maximize ? -gradient : gradient) * s.grad_scale;
    const bool penalty = s.kind != OptimizerKind::kAdamW && s.kind != OptimizerKind::kLion;
    if (penalty) g += decay * w;
    switch (s.kind) {
      case OptimizerKind::kAdamW:
      case OptimizerKind::kAdam: {
        m = beta1 * m + (1 - beta1) * g;
        v = beta2 * v + (1 - beta2) * g * g;
        const double m_hat = m / (1 - std::pow(beta1, static_cast<double>(s.t)));
        const double v_hat = v / (1 - std::pow(beta2, static_cast<double>(s.t)));
        if (!penalty) w -= lr * decay * w;
        w -= lr * m_hat / (std::sqrt(v_hat) + s.eps);
        return;
      }
      case OptimizerKind::kLion: {
        const double c = beta1 * m + (1 - beta1) * g;
        w -= lr * ((c > 0 ? 1 : c < 0 ? -1 : 0) + decay * w);
        m = beta2 * m + (1 - beta2) * g;
        return;
      }
      case OptimizerKind::kAdagrad:
        m += g * g;
        w -= lr * g / (std::sqrt(m) + s.eps);
        return;
      case OptimizerKind::kSgd:
        m = s.t == 1 ? g : beta1 * m + (1 - double{s.dampening}) * g;
        w -= lr * (s.nesterov ? g + beta1 * m : m);
        return;
    }
  }
};

struct Chapter {
  const char* name;
  OptimizerKind kind;
  float dampening = 0;
  bool nesterov = false;
  bool maximize = false;
};

class EveryTextbook : public ::testing::TestWithParam<Chapter> {};
const std::vector kChapters{
    Chapter{"adamw", OptimizerKind::kAdamW},
    Chapter{"adam", OptimizerKind::kAdam},
    Chapter{"lion", OptimizerKind::kLion},
    Chapter{"adagrad", OptimizerKind::kAdagrad},
    Chapter{"sgd", OptimizerKind::kSgd},
    Chapter{"sgd_dampened", OptimizerKind::kSgd, 0.3F},
    Chapter{"sgd_nesterov", OptimizerKind::kSgd, 0.0F, true},
    Chapter{"sgd_all", OptimizerKind::kSgd, 0.25F, true, true},
    Chapter{"adamw_up", OptimizerKind::kAdamW, 0.0F, false, true},
    Chapter{"adagrad_up", OptimizerKind::kAdagrad, 0.0F, false, true},
};
INSTANTIATE_TEST_SUITE_P(Textbook, EveryTextbook, ::testing::ValuesIn(kChapters),
                         [](const auto& of) { return std::string(of.param.name); });

TEST(Textbook, HasAPlainChapterForEveryOptimizer) {
  for (const OptimizerKind kind : testing::kAllOptimizers) {
    EXPECT_TRUE(std::ranges::any_of(kChapters, [kind](const Chapter& one) {
      return one.kind == kind && one.dampening == 0 && !one.nesterov && !one.maximize;
    })) << info_of(kind).name;
  }
}

TEST_P(EveryTextbook, IsFollowedForAThousandSteps) {
  constexpr std::size_t kCount = 97;
  constexpr int kSteps = 1000;
  constexpr std::uint32_t kSeed = 20;
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  const OptimizerKind kind = GetParam().kind;
  OptimizerStep::Settings settings = usual_settings(kind);
  settings.learning_rate = 1e-3f;
  if (kind == OptimizerKind::kAdagrad || kind == OptimizerKind::kSgd)
    settings.learning_rate = 1e-2f;
  settings.dampening = GetParam().dampening;
  settings.nesterov = GetParam().nesterov;
  settings.maximize = GetParam().maximize;
  State state(kCount, {.kind = kind});
  state.fill_like_training(kSeed);
  for (auto& moment : state.moments32) std::ranges::fill(moment.span(), 0.0f);
  std::vector<Textbook> textbook;
  for (const float w : state.master.span()) textbook.push_back({.w = w});

  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  double largest = 0, largest_moment = 0;
  for (int t = 1; t <= kSteps; ++t) {
    settings.t = static_cast<std::uint64_t>(t);
    for (std::size_t i = 0; i < kCount; ++i) {
      // A drift each element keeps, and noise: weights really move.
      const float drift = static_cast<float>(i % 7) - 3.0f;
      state.set_gradient(i, 0.01f * (drift + normal(random)));
      textbook[i].step(settings, static_cast<double>(bf16_to_float(state.grad16.data()[i])));
      largest = std::max(largest, std::fabs(textbook[i].w));
      largest_moment = std::max(largest_moment, std::fabs(textbook[i].m));
    }
    const OptimizerStep step = OptimizerStep::make(settings);
    internal::update(step, state.slice(kCount, step.decay));
  }
  ASSERT_GT(largest, 0.1);
  // Per step: roundings of the master and its decay (3 half-ulps of |w|), and an update of at most
  // about 3 lr whose relative error is some 32 half-ulps (moments carry 1/(1-beta) roundings each).
  // Worst case, all in one direction.
  const double half_ulp = 0x1p-24;
  const double tolerance = kSteps * half_ulp * (3 * largest + 32 * settings.learning_rate * 3);
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_NEAR(state.master.data()[i], textbook[i].w, tolerance) << i;
    // Adagrad's sum has a rounding for each of its steps; the others forget theirs.
    EXPECT_NEAR(state.moments32[0].data()[i], textbook[i].m, 600 * half_ulp * largest_moment) << i;
    if (textbook[i].v != 0) {
      EXPECT_NEAR(state.moments32[1].data()[i] / textbook[i].v, 1.0, 64 * half_ulp) << i;
    }
    EXPECT_EQ(state.param16.data()[i], float_to_bf16(state.master.data()[i]));
  }
}

TEST(Lion, TakesNoStepWhereMomentumAndGradientCancel) {
  State state(3, {.kind = OptimizerKind::kLion});
  const OptimizerStep step = OptimizerStep::make(usual_settings(OptimizerKind::kLion));
  for (std::size_t i = 0; i < 3; ++i) {
    state.set_master(i, 0.5f);
    state.moments32[0].data()[i] = 0.0f;
  }
  state.set_gradient(0, 0.0f);
  state.set_gradient(1, 1e-30f);
  state.set_gradient(2, -1e-30f);
  internal::update(step, state.slice(3, step.no_decay));
  EXPECT_EQ(state.master.data()[0], 0.5f);
  EXPECT_EQ(state.master.data()[1], 0.5f - 6e-4f);  // the sign alone says how far
  EXPECT_EQ(state.master.data()[2], 0.5f + 6e-4f);
}

}  // namespace textbook_test
}  // namespace ziggurat
