// SPDX-License-Identifier: Apache-2.0
// integrations/cli/simulate_options.h: the settings of `ziggurat simulate`, and the rehearsal that
// they make. Settings that `plan` or `train` also has are read in the same way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/plan/run_plan.h"
#include "core/plan/strategies/compare.h"
#include "core/rehearsal/rehearsal.h"
#include "integrations/cli/settings.h"

namespace ziggurat::cli {

std::span<const Setting> simulate_settings();

struct SimulateCommand {
  Job job;
  Strategy strategy;
  Training training;         ///< for the plan's figures, with the same batch and recomputation
  Machine computing;         ///< the job's machine, as it computes in the model's type
  RehearsalRequest request;  ///< without progress
  RunPlan plan;              ///< what the engine holds
  std::string chosen;        ///< why state is where it is; empty if the user says where
  std::optional<std::uint64_t> faults;  ///< the seed of what goes wrong; none if nothing does
  std::string json_path;                ///< empty for none
};

/// Reads the settings of `simulate`, and plans the run. Errors: UsageError; MemoryExhausted for
/// budgets that are too small, as a run would get it.
SimulateCommand read_simulate(const Settings& settings);

int simulate(const SimulateCommand& command);

}  // namespace ziggurat::cli
