// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/schedule_test.cc: schedules at steps worked out by hand, their shapes, and what
// is refused. cli_schedule_peers_test.py compares every step with DeepSpeed's and PyTorch's
// classes.
#include "optimizer/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "base/error.h"

namespace ziggurat {
namespace schedule_test {

using ::testing::HasSubstr;

double rate(const Schedule& schedule, std::uint64_t step) {
  return scheduled(schedule, step).learning_rate;
}

std::vector<double> rates(const Schedule& schedule, std::uint64_t steps) {
  std::vector<double> result;
  for (std::uint64_t step = 0; step < steps; ++step) result.push_back(rate(schedule, step));
  return result;
}

/// The largest change from one step to the next.
double largest_move(const Schedule& schedule, std::uint64_t steps) {
  const std::vector<double> all = rates(schedule, steps);
  double largest = 0;
  for (std::size_t i = 1; i < all.size(); ++i)
    largest = std::max(largest, std::abs(all[i] - all[i - 1]));
  return largest;
}

/// Agreement to a few units of the last place of a double, which no order of operations exceeds.
constexpr double kTiny = 1e-14;

TEST(Schedule, ConstantWarmsUpFromItsFirstStepAndStays) {
  const Schedule schedule = ConstantSchedule{.lr = 1.0, .warmup = 4};
  EXPECT_EQ(rates(schedule, 6), (std::vector<double>{0.25, 0.5, 0.75, 1, 1, 1}));
  EXPECT_EQ(rate(ConstantSchedule{.lr = 1.0, .warmup = 0}, 0), 1.0);
  EXPECT_EQ(rate(ConstantSchedule{.lr = 1.0, .warmup = 1}, 0), 1.0);
}

TEST(Schedule, CosineFallsFromTheWarmUpToItsEndAndStaysThere) {
  const Schedule schedule =
      CosineSchedule{.lr = 1.0, .min_lr = 0.1, .warmup = 2, .total_num_steps = 10};
  EXPECT_EQ(rates(schedule, 3), (std::vector<double>{0.5, 1, 1}));
  EXPECT_NEAR(rate(schedule, 4), 0.1 + 0.9 * (1 + std::numbers::sqrt2 / 2) / 2, kTiny);
  EXPECT_NEAR(rate(schedule, 6), 0.55, kTiny) << "half way";
  EXPECT_EQ(rate(schedule, 10), 0.1);
  EXPECT_EQ(rate(schedule, 1'000'000), 0.1);
}

TEST(Schedule, CosineWithoutRoomAfterTheWarmUpEndsAtOnce) {
  const Schedule schedule =
      CosineSchedule{.lr = 1.0, .min_lr = 0.1, .warmup = 4, .total_num_steps = 3};
  EXPECT_EQ(rates(schedule, 6), (std::vector<double>{0.25, 0.5, 0.75, 1, 0.1, 0.1}));
}

// Its cosine is our own series: within two units of the last place of the library's, everywhere.
TEST(Schedule, TheCosineIsRightToTheLastPlaces) {
  constexpr std::uint64_t kSteps = 100'003;
  const Schedule schedule = CosineSchedule{.lr = 2.0, .total_num_steps = kSteps};
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    const double exact =
        1 + std::cos(std::numbers::pi * static_cast<double>(step) / double{kSteps});
    ASSERT_NEAR(rate(schedule, step), exact, 1e-15) << step;
  }
}

TEST(Schedule, WarmupLRAlongALine) {
  const Schedule schedule = WarmupLR{.warmup_min_lr = 1,
                                     .warmup_max_lr = 5,
                                     .warmup_num_steps = 4,
                                     .warmup_type = WarmupType::kLinear};
  EXPECT_EQ(rates(schedule, 7), (std::vector<double>{1, 1, 2, 3, 4, 5, 5}))
      << "the first step has the constructor's rate, the second that of iteration 0";
}

TEST(Schedule, WarmupLRAlongALogarithm) {
  const Schedule schedule = WarmupLR{.warmup_max_lr = 3, .warmup_num_steps = 8};
  EXPECT_EQ(rate(schedule, 0), 0);
  EXPECT_EQ(rate(schedule, 1), 0);
  EXPECT_NEAR(rate(schedule, 2), 1, kTiny) << "log 2 of log 8";
  EXPECT_NEAR(rate(schedule, 4), 2, kTiny) << "log 4 of log 8";
  EXPECT_NEAR(rate(schedule, 8), 3, kTiny);
  EXPECT_EQ(rate(schedule, 9), 3);
}

TEST(Schedule, TheLogarithmIsRightToTheLastPlaces) {
  constexpr std::uint64_t kSteps = 100'003;
  const Schedule schedule = WarmupLR{.warmup_max_lr = 1, .warmup_num_steps = kSteps};
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const double exact = std::log(static_cast<double>(step)) / std::log(double{kSteps});
    ASSERT_NEAR(rate(schedule, step), exact, 5e-16) << step;
  }
}

TEST(Schedule, AWarmUpOfOneStepCountsAsTwo) {
  const WarmupLR one{.warmup_num_steps = 1};
  const WarmupLR two{.warmup_num_steps = 2};
  EXPECT_EQ(rates(one, 8), rates(two, 8));
}

TEST(Schedule, WarmupDecayLRComesBackToWhereItBegan) {
  const Schedule schedule = WarmupDecayLR{.warmup = {.warmup_min_lr = 1,
                                                     .warmup_max_lr = 5,
                                                     .warmup_num_steps = 4,
                                                     .warmup_type = WarmupType::kLinear},
                                          .total_num_steps = 12};
  EXPECT_EQ(rates(schedule, 6), (std::vector<double>{1, 1, 2, 3, 4, 5}));
  EXPECT_EQ(rate(schedule, 9), 3) << "half of the way down";
  EXPECT_EQ(rate(schedule, 13), 1);
  EXPECT_EQ(rate(schedule, 1'000'000), 1);
}

TEST(Schedule, WarmupCosineLRScalesTheRateItIsGiven) {
  const Schedule schedule = WarmupCosineLR{.lr = 2,
                                           .warmup_min_ratio = 0.5,
                                           .cos_min_ratio = 0.25,
                                           .warmup_num_steps = 4,
                                           .warmup_type = WarmupType::kLinear,
                                           .total_num_steps = 8};
  EXPECT_EQ(rates(schedule, 5), (std::vector<double>{0, 1, 1.25, 1.5, 1.75}))
      << "the first step has rate 0 in spite of its ratio";
  EXPECT_NEAR(rate(schedule, 6), 2 * (0.25 + 0.75 / 2), kTiny) << "half way";
  EXPECT_EQ(rate(schedule, 8), 0.5);
  EXPECT_EQ(rate(schedule, 1'000'000), 0.5);
}

OneCycle small_cycle() {
  return {.cycle_min_lr = 1,
          .cycle_max_lr = 5,
          .decay_lr_rate = 0,
          .cycle_first_step_size = 4,
          .cycle_second_step_size = 2,
          .cycle_second_stair_count = {},
          .cycle_min_mom = 0.5,
          .cycle_max_mom = 0.75};
}

TEST(Schedule, OneCycleGoesUpAndDownAndStays) {
  const std::vector<double> expected{1, 2, 3, 4, 5, 3, 1, 1, 1};
  const std::vector<double> got = rates(small_cycle(), expected.size());
  EXPECT_THAT(got, ::testing::Pointwise(::testing::DoubleNear(kTiny * 10), expected));
}

TEST(Schedule, OneCycleMovesTheMomentumTheOtherWay) {
  const auto beta1 = [](std::uint64_t step) { return scheduled(small_cycle(), step).betas->beta1; };
  EXPECT_EQ(beta1(0), 0.5) << "the constructor's: the lower bound, though the rate is low too";
  EXPECT_NEAR(beta1(2), 0.625, kTiny);
  EXPECT_NEAR(beta1(4), 0.5, kTiny);
  EXPECT_NEAR(beta1(6), 0.75, kTiny);
  EXPECT_EQ(beta1(100), 0.75);
  EXPECT_EQ(scheduled(small_cycle(), 3).betas->beta2, 0.99);
  OneCycle without = small_cycle();
  without.cycle_momentum = false;
  EXPECT_EQ(scheduled(without, 3).betas, std::nullopt);
}

TEST(Schedule, OneCycleDecaysAfterTheCycle) {
  OneCycle cycle = small_cycle();
  cycle.decay_step_size = 2;
  cycle.decay_lr_rate = 1;
  cycle.decay_mom_rate = 0.1;
  EXPECT_EQ(rate(cycle, 8), 0.5) << "one interval: 1 / (1 + 1)";
  EXPECT_EQ(rate(cycle, 12), 0.25);
  EXPECT_NEAR(scheduled(cycle, 8).betas->beta1, 0.825, kTiny);
}

TEST(Schedule, OneCycleOnStairsHasAsManyAsItIsToldInEachHalf) {
  OneCycle cycle = small_cycle();
  cycle.cycle_first_step_size = 12;
  cycle.cycle_second_step_size = 12;
  cycle.cycle_first_stair_count = 3;
  cycle.cycle_second_stair_count = 2;
  std::vector<double> up = rates(cycle, 13);
  std::vector<double> down = rates(cycle, 24);
  down.erase(down.begin(), down.begin() + 12);
  up.erase(std::unique(up.begin(), up.end()), up.end());
  down.erase(std::unique(down.begin(), down.end()), down.end());
  EXPECT_THAT(up, ::testing::Pointwise(::testing::DoubleNear(kTiny * 10),
                                       {1.0, 1 + 4.0 / 3, 1 + 8.0 / 3, 5.0}));
  EXPECT_THAT(down, ::testing::Pointwise(::testing::DoubleNear(kTiny * 10), {5.0, 3.0, 1.0}));
}

TEST(Schedule, LRRangeTestRisesOnALineOrInStairs) {
  LRRangeTest test{
      .lr_range_test_min_lr = 2, .lr_range_test_step_size = 4, .lr_range_test_step_rate = 0.5};
  EXPECT_EQ(rates(test, 6), (std::vector<double>{2, 2.25, 2.5, 2.75, 3, 3.25}));
  test.lr_range_test_staircase = true;
  EXPECT_EQ(rates(test, 10), (std::vector<double>{2, 2, 2, 2, 3, 3, 3, 3, 4, 4}));
}

TEST(Schedule, NoneJumpsBetweenNeighbours) {
  EXPECT_LT(largest_move(CosineSchedule{.lr = 1, .warmup = 100, .total_num_steps = 1000}, 1200),
            0.0101);
  const WarmupLR warmup{
      .warmup_max_lr = 1, .warmup_num_steps = 100, .warmup_type = WarmupType::kLinear};
  EXPECT_LT(largest_move(WarmupDecayLR{.warmup = warmup, .total_num_steps = 1000}, 1200), 0.0101);
  EXPECT_LT(largest_move(WarmupCosineLR{.lr = 1,
                                        .warmup_num_steps = 100,
                                        .warmup_type = WarmupType::kLinear,
                                        .total_num_steps = 1000},
                         1200),
            0.0101);
  OneCycle cycle = small_cycle();
  cycle.cycle_first_step_size = 500;
  cycle.cycle_second_step_size = 400;
  EXPECT_LT(largest_move(cycle, 1200), 0.0101);
}

std::string refusal(const Schedule& schedule) {
  try {
    validate(schedule);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(Schedule, NonsenseIsRefusedByTheNameOfItsParameter) {
  EXPECT_EQ(refusal(small_cycle()), "accepted");
  EXPECT_EQ(refusal(ConstantSchedule{.lr = 0}), "accepted");
  EXPECT_THAT(refusal(ConstantSchedule{.lr = -1}), HasSubstr("lr -1"));
  EXPECT_THAT(refusal(ConstantSchedule{.lr = std::nan("")}), HasSubstr("lr nan"));
  EXPECT_THAT(refusal(CosineSchedule{.lr = 1}), HasSubstr("total-num-steps 0"));
  EXPECT_THAT(refusal(CosineSchedule{.lr = 1, .min_lr = -1, .total_num_steps = 1}),
              HasSubstr("min-lr -1"));
  EXPECT_THAT(refusal(WarmupLR{.warmup_num_steps = 0}), HasSubstr("warmup-num-steps 0"));
  EXPECT_THAT(refusal(WarmupDecayLR{}), HasSubstr("total-num-steps 0"));
  EXPECT_THAT(refusal(WarmupCosineLR{.lr = 1, .cos_min_ratio = -1, .total_num_steps = 1}),
              HasSubstr("cos-min-ratio -1"));
  EXPECT_THAT(refusal(LRRangeTest{.lr_range_test_step_size = 0}),
              HasSubstr("lr-range-test-step-size 0"));
  OneCycle cycle = small_cycle();
  cycle.cycle_first_step_size = 0;
  EXPECT_THAT(refusal(cycle), HasSubstr("cycle-first-step-size 0"));
  cycle = small_cycle();
  cycle.cycle_max_mom = 1;
  EXPECT_THAT(refusal(cycle), HasSubstr("cycle-max-mom 1"));
}

}  // namespace schedule_test
}  // namespace ziggurat
