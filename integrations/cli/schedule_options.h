// SPDX-License-Identifier: Apache-2.0
// integrations/cli/schedule_options.h: the settings that choose a learning-rate schedule and its
// parameters, the same for every command that has one.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "integrations/cli/settings.h"
#include "optimizer/schedule.h"

namespace ziggurat::cli {

/// --schedule and every schedule's parameters: DeepSpeed's names, with dashes.
std::span<const Setting> schedule_settings();

struct ScheduleOptions {
  std::string name = "constant";
  Schedule schedule;
  std::map<std::string, std::string> parameters;  ///< by key, as text: those of this schedule
};

/// Reads and checks the schedule of a run of `steps`. Errors: UsageError, also for a parameter that
/// the chosen schedule does not have, and for a momentum that reaches 1 within the run.
ScheduleOptions read_schedule(const Settings& settings, std::uint64_t steps);

}  // namespace ziggurat::cli
