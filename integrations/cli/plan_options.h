// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_options.h: the settings of `ziggurat plan`, with their types and limits.
// Settings that `train` also has are read in the same way.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/mesh.h"
#include "core/plan/memory.h"
#include "core/plan/run_plan.h"
#include "core/plan/traffic.h"
#include "core/sharding/strategy.h"
#include "integrations/cli/settings.h"
#include "integrations/cli/train_options.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {

std::span<const Setting> plan_settings();

/// Returns the settings of train_table() that have these names.
std::vector<SettingOf<TrainOptions>> settings_of_train(std::span<const std::string_view> names);

/// Writes into `run` the settings of `plan` that `train` has too. Errors: UsageError.
void write_shared(const Settings& settings, TrainOptions& run);

/// A model that is given by its shape, or only by its count of parameters.
struct PlannedModel {
  std::string name;                        ///< as given
  std::optional<gpt::ModelConfig> config;  ///< none if only a count is given
  ModelSize size;                          ///< its size on one tensor-parallel rank
};

/// The plan of a strategy, or the reason for which the engine would refuse its budgets.
struct PlannedStrategy {
  Strategy strategy;
  RankMemory memory;           ///< for a count, only the state at rest
  std::optional<RunPlan> run;  ///< none for a count, or if refused
  std::string refusal;
};

struct PlanCommand {
  PlannedModel model;
  WorldSize world;
  MeshShape mesh;
  std::string warning;  ///< about the mesh; empty if there is none
  Recipe recipe;
  Placement placement;
  int slots = 2;
  std::uint64_t reduce_bucket_count = 0;
  TrainOptions run;  ///< the run that `train` would make; budgets of 0 were not given
  std::vector<Strategy> strategies;  ///< the one that was asked for, or all stages
  Quantization quantization;
  gpt::RunShape shape;    ///< decides what tensor-parallel ranks exchange
  int accumulate = 1;     ///< micro-batches in a step
  bool memory = true;     ///< show bytes held
  bool traffic = true;    ///< show bytes sent
  std::string json_path;  ///< empty to print the table
};

/// Reads the settings of `plan`. A number of threads that is not given follows from the cores of
/// this machine. Errors: UsageError.
PlanCommand read_plan(const Settings& settings);

/// Returns the request that step_traffic() takes, for a run whose micro-batches go unit by unit.
TrafficRequest traffic_request(const PlanCommand& command, const Strategy& strategy,
                               const Quantization& quantization);

int plan(const PlanCommand& command);

}  // namespace ziggurat::cli
