// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_schedule_test.cc: schedules and the loss scale through the C interface.
// tests/optimizer proves their values, tests/integrations/python that all are DeepSpeed's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "integrations/c/ziggurat.h"

namespace c_schedule_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kDecay =
    R"({"type": "WarmupDecayLR", "warmup_min_lr": 1, "warmup_max_lr": 5, "warmup_num_steps": 4,
        "warmup_type": "linear", "total_num_steps": 12})";
constexpr const char* kCycle =
    R"({"type": "OneCycle", "cycle_min_lr": 1, "cycle_max_lr": 5, "decay_lr_rate": 0,
        "cycle_first_step_size": 2.5, "cycle_second_step_size": 2, "cycle_first_stair_count": 0,
        "cycle_second_stair_count": 0, "decay_step_size": 0, "cycle_momentum": true,
        "cycle_min_mom": 0.5, "cycle_max_mom": 0.75, "decay_mom_rate": 0})";
constexpr const char* kScale =
    R"({"loss_scale_window": 2, "hysteresis": 1, "consecutive_hysteresis": false,
        "min_loss_scale": 4, "ends_at_minimum": true})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

std::string refusal(const std::string& schedule) {
  auto step = ZIGGURAT_INIT(ziggurat_scheduled_step);
  EXPECT_EQ(ziggurat_schedule(schedule.c_str(), 1, &step), ZIGGURAT_INVALID_ARGUMENT) << schedule;
  return ziggurat_last_error();
}

TEST(ScheduleInC, GivesWhatAStepIsMadeWith) {
  auto step = ZIGGURAT_INIT(ziggurat_scheduled_step);
  ASSERT_EQ(ziggurat_schedule(kDecay.c_str(), 9, &step), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_EQ(step.learning_rate, 3) << "half of the way down";
  EXPECT_EQ(step.has_betas, 0U);
  ASSERT_EQ(ziggurat_schedule(kCycle, 3, &step), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_NEAR(step.learning_rate, 4, 1e-12) << "a quarter of the way down, 2.5 steps having risen";
  EXPECT_EQ(step.has_betas, 1U);
  EXPECT_NEAR(step.beta1, 0.75 - 0.75 * 0.25, 1e-12);
  EXPECT_EQ(step.beta2, 0.99);
}

TEST(ScheduleInC, ACurveIsAsItWasGiven) {
  auto step = ZIGGURAT_INIT(ziggurat_scheduled_step);
  const std::string falls =
      R"({"type": "LRRangeTest", "lr_range_test_min_lr": 2, "lr_range_test_step_size": 4,
          "lr_range_test_step_rate": -2, "lr_range_test_staircase": true})";
  ASSERT_EQ(ziggurat_schedule(falls.c_str(), 4, &step), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_EQ(step.learning_rate, -2) << "a rate is not judged";
}

TEST(ScheduleInC, WhatIsNoScheduleIsRefusedByItsKey) {
  EXPECT_THAT(refusal("[]"), HasSubstr("schedule must be a JSON object"));
  EXPECT_THAT(refusal(R"({"type": "cosine"})"),
              AllOf(HasSubstr("cosine"), HasSubstr("WarmupCosineLR")));
  EXPECT_THAT(refusal(replaced(kDecay, "total_num_steps", "steps")),
              HasSubstr("\"total_num_steps\" is missing, and must be a number"));
  EXPECT_THAT(refusal(replaced(kDecay, "4", "-4")),
              HasSubstr("\"warmup_num_steps\" is -4, and must be a whole number"));
  EXPECT_THAT(refusal(replaced(kDecay, "linear", "steep")), HasSubstr("\"steep\""));
  EXPECT_EQ(ziggurat_schedule(kDecay.c_str(), 0, nullptr), ZIGGURAT_INVALID_ARGUMENT);
  auto step = ZIGGURAT_INIT(ziggurat_scheduled_step);
  EXPECT_EQ(ziggurat_schedule(nullptr, 0, &step), ZIGGURAT_INVALID_ARGUMENT);
}

TEST(LossScaleInC, MovesAsItsSettingsSayAndEndsAtItsMinimum) {
  auto scale = ZIGGURAT_INIT(ziggurat_loss_scale);
  scale.scale = 8, scale.hysteresis_left = 1;
  for (const double expected : {8, 8, 16}) {
    ASSERT_EQ(ziggurat_update_loss_scale(kScale, 0, &scale), ZIGGURAT_OK) << ziggurat_last_error();
    EXPECT_EQ(scale.scale, expected);
  }
  for (const double expected : {8, 4}) {
    ASSERT_EQ(ziggurat_update_loss_scale(kScale, 1, &scale), ZIGGURAT_OK) << ziggurat_last_error();
    EXPECT_EQ(scale.scale, expected);
  }
  EXPECT_EQ(scale.steps_since_overflow, 0U);
  EXPECT_EQ(ziggurat_update_loss_scale(kScale, 1, &scale), ZIGGURAT_NOT_FINITE);
  EXPECT_EQ(scale.scale, 4);
  const std::string stays =
      replaced(kScale, "\"ends_at_minimum\": true", "\"ends_at_minimum\": false");
  ASSERT_EQ(ziggurat_update_loss_scale(stays.c_str(), 1, &scale), ZIGGURAT_OK);
  EXPECT_EQ(scale.scale, 4);
  EXPECT_EQ(ziggurat_update_loss_scale("{}", 1, &scale), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("settings: \"loss_scale_window\" is missing"));
}

}  // namespace c_schedule_test
