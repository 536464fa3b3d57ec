// SPDX-License-Identifier: Apache-2.0
// integrations/cli/schedule_options.h: the settings that choose a learning-rate schedule and its
// parameters, shared by all commands that have a schedule.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "base/setting.h"
#include "optimizer/schedule.h"

namespace ziggurat::cli {

class Settings;

enum class ScheduleName : std::uint8_t {
  kConstant,
  kCosine,
  kWarmupLR,
  kWarmupDecayLR,
  kWarmupCosineLR,
  kOneCycle,
  kLRRangeTest
};

/// The parameters of all schedules, named as in DeepSpeed if DeepSpeed has them.
struct ScheduleParameters {
  ScheduleName schedule = ScheduleName::kConstant;
  double lr = 6e-4;
  std::uint64_t warmup = 10;
  double min_lr = 0;
  std::optional<std::uint64_t> total_num_steps;
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr;
  std::uint64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::kLog;
  double warmup_min_ratio = 0;
  double cos_min_ratio = 0.0001;
  std::optional<double> cycle_min_lr, cycle_max_lr;
  std::uint64_t cycle_first_step_size = 2000;
  std::optional<std::uint64_t> cycle_second_step_size;
  std::uint64_t decay_step_size = 0;
  OneCycle cycle;  ///< without its rates and sizes, which are above
  LRRangeTest range_test;
};

/// Returns the settings that choose the schedule and every schedule's parameters.
std::span<const SettingOf<ScheduleParameters>> schedule_settings();

struct ScheduleOptions {
  ScheduleParameters given;
  std::string name = "constant";
  Schedule schedule;
  std::map<std::string, std::string> parameters;  ///< those of this schedule, as text by flag
};

/// Makes options.schedule for a run of `steps` steps from options.given, and fills in the
/// parameters that were not given. Errors: UsageError, also for a parameter that the chosen
/// schedule does not have, and for a momentum that reaches 1 within the run.
void make_schedule(ScheduleOptions& options, const Settings& settings, std::uint64_t steps);

}  // namespace ziggurat::cli
