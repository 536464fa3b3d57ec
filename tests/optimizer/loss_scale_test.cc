// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/loss_scale_test.cc: when a scale halves, doubles and gives up, and that its state
// is all it needs. loss_scale_peers_test.py compares it with DeepSpeed's.
#include "optimizer/loss_scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "base/error.h"

namespace ziggurat {
namespace loss_scale_test {

using ::testing::HasSubstr;

void update(LossScaler& scaler, int times, bool overflow) {
  for (int i = 0; i < times; ++i) scaler.update(overflow);
}

TEST(LossScaler, BeginsAtThePowerItIsGiven) {
  EXPECT_EQ(LossScaler({}).scale(), 65536);
  EXPECT_EQ(LossScaler({.initial_scale_power = 3}).scale(), 8);
}

TEST(LossScaler, HalvesWhenTheHysteresisIsUsedUpAndAtEveryOverflowFromThen) {
  LossScaler scaler({.initial_scale_power = 8, .hysteresis = 3});
  update(scaler, 2, true);
  EXPECT_EQ(scaler.scale(), 256);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 128);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 64);
}

TEST(LossScaler, DoublesAfterAWholeWindowWithoutOverflowAndThenEveryWindow) {
  LossScaler scaler({.initial_scale_power = 4, .loss_scale_window = 10});
  update(scaler, 10, false);
  EXPECT_EQ(scaler.scale(), 16);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 32);
  update(scaler, 9, false);
  EXPECT_EQ(scaler.scale(), 32);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 64);
}

TEST(LossScaler, AnOverflowStartsTheWindowAgain) {
  LossScaler scaler({.initial_scale_power = 4, .loss_scale_window = 10});
  update(scaler, 8, false);
  scaler.update(true);
  update(scaler, 10, false);
  EXPECT_EQ(scaler.scale(), 16);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 32);
}

TEST(LossScaler, ForgivesAgainAfterGrowthOrAfterAnyCleanStepIfConsecutive) {
  for (const bool consecutive : {false, true}) {
    LossScaler scaler({.initial_scale_power = 8,
                       .loss_scale_window = 5,
                       .hysteresis = 2,
                       .consecutive_hysteresis = consecutive});
    scaler.update(true);
    scaler.update(false);
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), consecutive ? 256 : 128);
    update(scaler, 6, false);
    const double grown = scaler.scale();
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), grown) << "the first overflow after growth is forgiven";
  }
}

TEST(LossScaler, GivesUpBelowItsMinimumAndKeepsItsState) {
  LossScaler scaler({.initial_scale_power = 2, .hysteresis = 1, .min_loss_scale = 3});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 3);
  const LossScaler::State before = scaler.state();
  try {
    scaler.update(true);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFinite);
    EXPECT_THAT(error.what(), HasSubstr("min_loss_scale"));
  }
  EXPECT_EQ(scaler.state(), before);
}

TEST(LossScaler, AStaticScaleNeverMoves) {
  LossScaler scaler({.loss_scale = 128});
  EXPECT_FALSE(scaler.dynamic());
  update(scaler, 50, true);
  update(scaler, 5000, false);
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, ResumedAtAnyPointItGoesOnAsIfItHadNot) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const LossScaleConfig config{.initial_scale_power = 100,
                                 .loss_scale_window = 1 + random() % 20,
                                 .hysteresis = 1 + random() % 4,
                                 .consecutive_hysteresis = random() % 2 == 0,
                                 .min_loss_scale = 1e-30};
    LossScaler whole(config);
    LossScaler resumed(config);
    for (int step = 0; step < 100; ++step) {
      const bool overflow = random() % 4 == 0;
      whole.update(overflow);
      resumed = LossScaler(config, resumed.state());
      resumed.update(overflow);
      ASSERT_EQ(resumed.state(), whole.state()) << "step " << step;
    }
  }
}

TEST(LossScaler, ResumedWithOtherSettingsItKeepsWithinThem) {
  const LossScaler::State state{.scale = 64, .hysteresis_left = 5, .steps_since_overflow = 3};
  EXPECT_EQ(LossScaler({.loss_scale = 8}, state).scale(), 8);
  EXPECT_EQ(LossScaler({.min_loss_scale = 256}, state).scale(), 256);
  EXPECT_EQ(LossScaler({.hysteresis = 2}, state).state().hysteresis_left, 2U);
}

TEST(LossScaler, NonsenseIsRefusedByTheNameOfItsParameter) {
  const auto refusal = [](const LossScaleConfig& config) -> std::string {
    try {
      const LossScaler scaler(config);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(refusal({.loss_scale = -1}), HasSubstr("loss_scale -1"));
  EXPECT_THAT(refusal({.initial_scale_power = -1}), HasSubstr("initial_scale_power -1"));
  EXPECT_THAT(refusal({.initial_scale_power = 127}), HasSubstr("initial_scale_power 127"));
  EXPECT_THAT(refusal({.loss_scale_window = 0}), HasSubstr("loss_scale_window"));
  EXPECT_THAT(refusal({.hysteresis = 0}), HasSubstr("hysteresis"));
  EXPECT_THAT(refusal({.min_loss_scale = 0}), HasSubstr("min_loss_scale"));
}

}  // namespace loss_scale_test
}  // namespace ziggurat
