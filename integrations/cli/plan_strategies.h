// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_strategies.h: `ziggurat plan --machine`, which compares the strategies of
// all systems for a model on a machine. Without a machine, `plan` says exactly what our own trainer
// holds (plan_options.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/plan/strategies/compare.h"
#include "integrations/cli/settings.h"
#include "integrations/cli/train_options.h"

namespace ziggurat::cli {

struct StrategiesCommand {
  Job job;
  /// What a config file or flags ask for; it is judged first, beside the usual strategies.
  std::optional<ParallelLayout> asked;
  std::string usual;  ///< " --batch 1": the flags of a job that were not given, as if they were
  bool asks_fp32 = false;   ///< which is said, and not planned
  std::string json_path;    ///< empty to print
  std::string config_path;  ///< a file for DeepSpeed's config of the recommendation; empty for none
  std::string nvme_path;    ///< the folder that it names for what lies on NVMe
};

/// DeepSpeed's config of a strategy.
struct DeepSpeedConfig {
  std::string text;
  std::vector<std::string> script_must;  ///< what the strategy takes that no such config says
};

/// Errors: UsageError if it lies on NVMe and the command has no nvme_path; kInvalidArgument if
/// such a config cannot say it.
DeepSpeedConfig deepspeed_config(const StrategiesCommand& command, const Verdict& best);

/// Prints the page that answers the command.
void print_strategies(const StrategiesCommand& command, const Comparison& comparison);

/// Reads the model, the machine and the batch of a command that compares or simulates; `run` has
/// its settings of `train`. Errors: UsageError.
Job read_job(const Settings& settings, const TrainOptions& run);

/// Returns a strategy in the words of all systems.
ParallelLayout layout_of(const Strategy& strategy, const Placement& placement);

/// Returns the bytes of a parameter's state.
StateRecipe recipe_of(const StateKind& state);

/// Reads the settings of `plan`. Errors: UsageError.
StrategiesCommand read_strategies_plan(const Settings& settings);

int plan_strategies(const StrategiesCommand& command);

}  // namespace ziggurat::cli
