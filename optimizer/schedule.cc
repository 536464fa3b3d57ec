// SPDX-License-Identifier: Apache-2.0
// optimizer/schedule.cc: computes the schedules, each in the order of operations of its model.
#include "optimizer/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace ziggurat {
namespace {

/// DeepSpeed's OneCycle sets this beta2, whatever the optimizer was given.
constexpr double kOneCycleBeta2 = 0.99;

/// Returns 1 - s / (f (f + 1)) (1 - s / ((f + 2) (f + 3)) (1 - ...)). With f = 1 this is the Taylor
/// series of cos(sqrt s), with f = 2 that of sin(sqrt s) / sqrt s. For s <= (pi/4)^2 ten terms
/// leave an error of less than 1e-19.
double alternating_series(double s, double f) {
  double sum = 1.0;
  for (double n = f + 18.0; n >= f; n -= 2.0) sum = 1.0 - s / (n * (n + 1.0)) * sum;
  return sum;
}

/// Returns cos(pi x) for x in [0, 1].
double cos_pi(double x) {
  if (x > 0.5) return -cos_pi(1.0 - x);
  const bool as_sine = x > 0.25;  // the sine of the rest of a right angle is used if that rest is
                                  // smaller
  const double angle = std::numbers::pi * (as_sine ? 0.5 - x : x);
  return as_sine ? angle * alternating_series(angle * angle, 2.0)
                 : alternating_series(angle * angle, 1.0);
}

/// Returns ln(x) for x >= 1: x = m 2^e with m near 1, and ln m = 2 atanh((m - 1) / (m + 1)) as a
/// series.
double natural_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // exact, so every libm agrees
  if (m < std::numbers::sqrt2 / 2) {
    m = m * 2.0;
    --exponent;
  }
  const double z = (m - 1.0) / (m + 1.0);
  const double square = z * z;
  double sum = 0.0;
  for (double n = 25.0; n >= 1.0; n -= 2.0) sum = 1.0 / n + square * sum;
  return 2.0 * z * sum + static_cast<double>(exponent) * std::numbers::ln2;
}

ScheduledStep at(const ConstantSchedule& s, std::uint64_t step) {
  if (step + 1 >= s.warmup) return {.learning_rate = s.lr};
  return {.learning_rate = s.lr * static_cast<double>(step + 1) / static_cast<double>(s.warmup)};
}

ScheduledStep at(const CosineSchedule& s, std::uint64_t step) {
  if (step < s.warmup) return at(ConstantSchedule{.lr = s.lr, .warmup = s.warmup}, step);
  if (step >= s.total_num_steps) return {.learning_rate = s.min_lr};
  const double progress =
      static_cast<double>(step - s.warmup) / static_cast<double>(s.total_num_steps - s.warmup);
  return {.learning_rate = s.min_lr + (s.lr - s.min_lr) * ((1.0 + cos_pi(progress)) / 2.0)};
}

/// Returns the steps of a warm-up, at least 2: DeepSpeed does not allow one step, whose logarithm
/// is zero.
std::uint64_t warmup_steps(std::uint64_t warmup_num_steps) {
  return std::max<std::uint64_t>(2, warmup_num_steps);
}

/// Returns how far the warm-up is at `iteration`, which is before its end: 0 to 1.
double warmed(WarmupType type, std::uint64_t iteration, std::uint64_t steps) {
  if (type == WarmupType::kLinear)
    return static_cast<double>(iteration) / static_cast<double>(steps);
  const double inverse = 1.0 / natural_log(static_cast<double>(steps));
  return inverse * natural_log(static_cast<double>(iteration + 1));
}

ScheduledStep at(const WarmupLR& s, std::uint64_t step) {
  if (step == 0) return {.learning_rate = s.warmup_min_lr};
  const std::uint64_t iteration = step - 1;
  const std::uint64_t steps = warmup_steps(s.warmup_num_steps);
  const double gamma = iteration < steps ? warmed(s.warmup_type, iteration, steps) : 1.0;
  return {.learning_rate = s.warmup_min_lr + (s.warmup_max_lr - s.warmup_min_lr) * gamma};
}

ScheduledStep at(const WarmupDecayLR& s, std::uint64_t step) {
  const std::uint64_t steps = warmup_steps(s.warmup.warmup_num_steps);
  if (step <= steps) return at(s.warmup, step);
  const double window = std::max(1.0, s.total_num_steps - static_cast<double>(steps));
  const double gamma = std::max(0.0, (s.total_num_steps - static_cast<double>(step - 1)) / window);
  const double range = s.warmup.warmup_max_lr - s.warmup.warmup_min_lr;
  return {.learning_rate = s.warmup.warmup_min_lr + range * gamma};
}

ScheduledStep at(const WarmupCosineLR& s, std::uint64_t step) {
  if (step == 0) return {.learning_rate = 0.0};
  const std::uint64_t iteration = step - 1;
  const std::uint64_t steps = warmup_steps(s.warmup_num_steps);
  if (iteration < steps) {
    const double ratio = warmed(s.warmup_type, iteration, steps);
    return {.learning_rate = s.lr * (s.warmup_min_ratio + ratio * (1.0 - s.warmup_min_ratio))};
  }
  const double window = std::max(1.0, s.total_num_steps - static_cast<double>(steps));
  const double progress = std::min(1.0, static_cast<double>(iteration - steps + 1) / window);
  const double ratio = (1.0 + cos_pi(progress)) / 2.0;
  return {.learning_rate = s.lr * std::max(0.0, s.cos_min_ratio + (1.0 - s.cos_min_ratio) * ratio)};
}

/// Returns the height of the cycle after `done` of its steps: 0 at its ends, 1 at the peak.
double cycle_height(const OneCycle& s, double done) {
  const double first = s.cycle_first_step_size;
  const double second = s.cycle_second_step_size.value_or(first);
  const double total = first + second;
  const double peak = first / total;
  const double x = 1.0 + done / total - std::floor(1.0 + done / total);
  const bool rising = x <= peak;
  const std::uint64_t stairs = rising
                                   ? s.cycle_first_stair_count
                                   : s.cycle_second_stair_count.value_or(s.cycle_first_stair_count);
  if (stairs == 0) return rising ? x / peak : (x - 1.0) / (peak - 1.0);
  const double within = std::fmod(done, total);  // exact, so every libm agrees
  const auto count = static_cast<double>(stairs);
  const double position =
      within <= first ? within * count / first : (total - within) * count / second;
  return std::floor(position) / count;
}

ScheduledStep at(const OneCycle& s, std::uint64_t step) {
  const auto with = [&](double lr, double momentum) {
    ScheduledStep result{.learning_rate = lr};
    if (s.cycle_momentum) result.betas = Betas{.beta1 = momentum, .beta2 = kOneCycleBeta2};
    return result;
  };
  if (step == 0) return with(s.cycle_min_lr, s.cycle_min_mom);
  const auto done = static_cast<double>(step);
  const double total =
      s.cycle_first_step_size + s.cycle_second_step_size.value_or(s.cycle_first_step_size);
  if (done - 1 < total) {
    const double height = cycle_height(s, done);
    return with(s.cycle_min_lr + (s.cycle_max_lr - s.cycle_min_lr) * height,
                s.cycle_max_mom - (s.cycle_max_mom - s.cycle_min_mom) * height);
  }
  if (s.decay_step_size == 0) return with(s.cycle_min_lr, s.cycle_max_mom);
  const double intervals = (done - total) / s.decay_step_size;
  return with(s.cycle_min_lr / (1.0 + s.decay_lr_rate * intervals),
              s.cycle_max_mom * (1.0 + s.decay_mom_rate * intervals));
}

ScheduledStep at(const LRRangeTest& s, std::uint64_t step) {
  const double exact = static_cast<double>(step) / static_cast<double>(s.lr_range_test_step_size);
  const double intervals = s.lr_range_test_staircase ? std::floor(exact) : exact;
  return {.learning_rate = s.lr_range_test_min_lr * (1.0 + s.lr_range_test_step_rate * intervals)};
}

void require(bool good, std::string_view parameter, double value, std::string_view what) {
  if (!good)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} {:g} is not valid: {}", parameter, value, what));
}

void require_rate(std::string_view parameter, double value) {
  require(std::isfinite(value) && value >= 0, parameter, value,
          "the value must be finite and 0 or more");
}

void require_steps(std::string_view parameter, double value) {
  require(std::isfinite(value) && value > 0, parameter, value, "the value must be more than 0");
}

void require_momentum(std::string_view parameter, double value) {
  require(value >= 0 && value < 1, parameter, value,
          "the value must be at least 0 and less than 1");
}

void check(const ConstantSchedule& s) { require_rate("lr", s.lr); }

void check(const CosineSchedule& s) {
  require_rate("lr", s.lr);
  require_rate("min-lr", s.min_lr);
  require_steps("total-num-steps", static_cast<double>(s.total_num_steps));
}

void check(const WarmupLR& s) {
  require_rate("warmup-min-lr", s.warmup_min_lr);
  require_rate("warmup-max-lr", s.warmup_max_lr);
  require_steps("warmup-num-steps", static_cast<double>(s.warmup_num_steps));
}

void check(const WarmupDecayLR& s) {
  check(s.warmup);
  require_steps("total-num-steps", s.total_num_steps);
}

void check(const WarmupCosineLR& s) {
  require_rate("lr", s.lr);
  require_rate("warmup-min-ratio", s.warmup_min_ratio);
  require_rate("cos-min-ratio", s.cos_min_ratio);
  require_steps("warmup-num-steps", static_cast<double>(s.warmup_num_steps));
  require_steps("total-num-steps", s.total_num_steps);
}

void check(const OneCycle& s) {
  require_rate("cycle-min-lr", s.cycle_min_lr);
  require_rate("cycle-max-lr", s.cycle_max_lr);
  require_rate("decay-lr-rate", s.decay_lr_rate);
  require_steps("cycle-first-step-size", s.cycle_first_step_size);
  require_momentum("cycle-min-mom", s.cycle_min_mom);
  require_momentum("cycle-max-mom", s.cycle_max_mom);
  require_rate("decay-mom-rate", s.decay_mom_rate);
}

void check(const LRRangeTest& s) {
  require_rate("lr-range-test-min-lr", s.lr_range_test_min_lr);
  require_rate("lr-range-test-step-rate", s.lr_range_test_step_rate);
  require_steps("lr-range-test-step-size", static_cast<double>(s.lr_range_test_step_size));
}

}  // namespace

ScheduledStep scheduled(const Schedule& schedule, std::uint64_t step) noexcept {
  return std::visit([step](const auto& parameters) { return at(parameters, step); }, schedule);
}

void validate(const Schedule& schedule) {
  std::visit([](const auto& parameters) { check(parameters); }, schedule);
}

}  // namespace ziggurat
