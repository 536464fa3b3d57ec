// SPDX-License-Identifier: Apache-2.0
// optimizer/schedule.h: the learning rate of a step, as a pure function of the number of steps
// before it.
//
// A schedule has parameters and no state, so a resumed run needs its step number only. Rates are
// computed in double with + - x / in a fixed order, so they have the same bits on every machine.
// The logarithm and the cosine are our own, because libm chooses its versions by CPU. Schedules
// named like DeepSpeed's classes behave like those of its version 0.19.8 (runtime/lr_schedules.py),
// parameters and oddities included. DeepSpeed moves a scheduler after each step, so our step 0 has
// the rate that its constructor sets, and step s > 0 has the rate of its iteration s - 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

namespace ziggurat {

/// The coefficients of the moving averages in Adam and its relatives.
struct Betas {
  double beta1;
  double beta2;
  bool operator==(const Betas&) const = default;
};

struct ScheduledStep {
  double learning_rate = 0;
  std::optional<Betas> betas = std::nullopt;  ///< set if the schedule changes the betas too
};

/// A constant lr after a linear warm-up whose first step has lr / warmup.
struct ConstantSchedule {
  double lr = 0;
  std::uint64_t warmup = 0;
};

/// A linear warm-up like ConstantSchedule's, then half a cosine from lr at step `warmup` to min_lr
/// at step total_num_steps, and min_lr from then on. Loshchilov & Hutter 2017, equation 5, without
/// restarts; PyTorch's LinearLR(1 / warmup, total_iters=warmup - 1) followed by CosineAnnealingLR.
struct CosineSchedule {
  double lr = 0;
  double min_lr = 0;
  std::uint64_t warmup = 0;
  std::uint64_t total_num_steps = 0;
};

enum class WarmupType : std::uint8_t { kLog, kLinear };

/// A rise from warmup_min_lr to warmup_max_lr along a logarithm or a line, then constant.
struct WarmupLR {
  double warmup_min_lr = 0;
  double warmup_max_lr = 0.001;
  std::uint64_t warmup_num_steps = 1000;  ///< 1 counts as 2
  WarmupType warmup_type = WarmupType::kLog;
};

/// The warm-up of WarmupLR, then a line down that is back at warmup_min_lr after total_num_steps,
/// which need not be whole, as in DeepSpeed: scripts compute it as a share of something.
struct WarmupDecayLR {
  WarmupLR warmup;
  double total_num_steps = 0;
};

/// Ratios of lr: a warm-up from warmup_min_ratio to 1, then a cosine to cos_min_ratio. The first
/// step has rate 0, whatever warmup_min_ratio is.
struct WarmupCosineLR {
  double lr = 0;
  double warmup_min_ratio = 0;
  double cos_min_ratio = 0.0001;
  std::uint64_t warmup_num_steps = 1000;  ///< 1 counts as 2
  WarmupType warmup_type = WarmupType::kLog;
  double total_num_steps = 0;  ///< need not be whole
};

/// One cycle up and down, then decay (Smith 2018). With cycle_momentum, beta1 moves in the opposite
/// direction and beta2 is 0.99, whatever the optimizer's; the first step has cycle_min_mom. Sizes
/// need not be whole, as in DeepSpeed.
struct OneCycle {
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  double cycle_first_step_size = 2000;
  std::optional<double> cycle_second_step_size;  ///< cycle_first_step_size if not set
  std::uint64_t cycle_first_stair_count = 0;     ///< 0 means no stairs
  std::optional<std::uint64_t> cycle_second_stair_count;
  double decay_step_size = 0;  ///< 0 means no decay
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
};

/// A rate that rises until training diverges, to find the largest rate that does not (Smith 2018).
struct LRRangeTest {
  double lr_range_test_min_lr = 0.001;
  std::uint64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;
};

using Schedule = std::variant<ConstantSchedule, CosineSchedule, WarmupLR, WarmupDecayLR,
                              WarmupCosineLR, OneCycle, LRRangeTest>;

/// Returns the rate and betas of step `step` (from 0: the number of steps finished before it).
ScheduledStep scheduled(const Schedule& schedule, std::uint64_t step) noexcept;

/// Checks a schedule. Errors: kInvalidArgument, naming the wrong parameter (a negative or
/// non-finite rate, a number of steps of 0 by which something is divided, a momentum outside [0,
/// 1)).
void validate(const Schedule& schedule);

}  // namespace ziggurat
