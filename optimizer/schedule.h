// SPDX-License-Identifier: Apache-2.0
// optimizer/schedule.h: the learning rate of a step, as a pure function of the steps before it.
//
// A schedule is its parameters and has no state: a resumed run needs its step number only. Computed
// in double with + - x / in a fixed order (the logarithm and the cosine are our own, for libm's
// pick by CPU), so it has the same bits on every machine. Those named as DeepSpeed's classes are
// those of its version 0.19.8 (runtime/lr_schedules.py), parameters and oddities included. Its
// engine moves a scheduler after each step: our step 0 has the rate that its constructor sets, and
// step s > 0 that of its iteration s - 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

namespace ziggurat {

/// The moving averages of Adam's family.
struct Betas {
  double beta1;
  double beta2;
  bool operator==(const Betas&) const = default;
};

struct ScheduledStep {
  double learning_rate = 0;
  std::optional<Betas> betas = std::nullopt;  ///< where the schedule moves them too
};

/// lr, after a linear warm-up whose first step has lr / warmup.
struct ConstantSchedule {
  double lr = 0;
  std::uint64_t warmup = 0;
};

/// The same warm-up, then half a cosine from lr at step `warmup` to min_lr at step total_num_steps,
/// and min_lr from there on. Loshchilov & Hutter 2017, equation 5, without restarts; PyTorch's
/// LinearLR(1 / warmup, total_iters=warmup - 1) followed by CosineAnnealingLR.
struct CosineSchedule {
  double lr = 0;
  double min_lr = 0;
  std::uint64_t warmup = 0;
  std::uint64_t total_num_steps = 0;
};

enum class WarmupType : std::uint8_t { kLog, kLinear };

/// From warmup_min_lr to warmup_max_lr along a logarithm or a line, then constant.
struct WarmupLR {
  double warmup_min_lr = 0;
  double warmup_max_lr = 0.001;
  std::uint64_t warmup_num_steps = 1000;  ///< 1 counts as 2
  WarmupType warmup_type = WarmupType::kLog;
};

/// WarmupLR's warm-up, then a line down that is back at warmup_min_lr after total_num_steps.
struct WarmupDecayLR {
  WarmupLR warmup;
  std::uint64_t total_num_steps = 0;
};

/// Ratios of lr: a warm-up from warmup_min_ratio to 1, then a cosine to cos_min_ratio. The first
/// step has rate 0 whatever warmup_min_ratio is.
struct WarmupCosineLR {
  double lr = 0;
  double warmup_min_ratio = 0;
  double cos_min_ratio = 0.0001;
  std::uint64_t warmup_num_steps = 1000;  ///< 1 counts as 2
  WarmupType warmup_type = WarmupType::kLog;
  std::uint64_t total_num_steps = 0;
};

/// One cycle up and down, then decay (Smith 2018). With cycle_momentum beta1 goes the other way and
/// beta2 is 0.99, whatever the optimizer's; the first step has cycle_min_mom.
struct OneCycle {
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  std::uint64_t cycle_first_step_size = 2000;
  std::optional<std::uint64_t> cycle_second_step_size;  ///< default: the first's
  std::uint64_t cycle_first_stair_count = 0;            ///< 0: no stairs
  std::optional<std::uint64_t> cycle_second_stair_count;
  std::uint64_t decay_step_size = 0;  ///< 0: no decay
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
};

/// A rate that rises until training diverges, to find the largest that does not (Smith 2018).
struct LRRangeTest {
  double lr_range_test_min_lr = 0.001;
  std::uint64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;
};

using Schedule = std::variant<ConstantSchedule, CosineSchedule, WarmupLR, WarmupDecayLR,
                              WarmupCosineLR, OneCycle, LRRangeTest>;

/// What step `step` (from 0: the number of steps finished before it) is made with.
ScheduledStep scheduled(const Schedule& schedule, std::uint64_t step) noexcept;

/// Errors: kInvalidArgument naming the parameter that makes no schedule (a negative or non-finite
/// rate, no steps in what is divided by them, a momentum outside [0, 1)).
void validate(const Schedule& schedule);

}  // namespace ziggurat
