// SPDX-License-Identifier: Apache-2.0
// integrations/cli/schedule_options.h: the settings that choose a learning-rate schedule and its
// parameters, the same for every command that has one.
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

/// Every schedule's parameters, by DeepSpeed's names where it has them.
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
  OneCycle cycle;  ///< but for the rates
  LRRangeTest range_test;
};

/// The schedule and every schedule's parameters.
std::span<const SettingOf<ScheduleParameters>> schedule_settings();

struct ScheduleOptions {
  ScheduleParameters given;
  std::string name = "constant";
  Schedule schedule;
  std::map<std::string, std::string> parameters;  ///< by flag, as text: those of this schedule
};

/// Makes the schedule of a run of `steps` of what is `given`, and fills in there what it is made
/// with. Errors: UsageError, also for a parameter that the chosen schedule does not have, and for a
/// momentum that reaches 1 within the run.
void make_schedule(ScheduleOptions& options, const Settings& settings, std::uint64_t steps);

}  // namespace ziggurat::cli
