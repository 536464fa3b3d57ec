// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_options.h: the settings of `ziggurat plan`: their table, their types, their
// limits. What `train` has too is read alike.
#pragma once

#include <optional>
#include <span>
#include <string>
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

/// A model by its shape, or by its parameter count only.
struct PlannedModel {
  std::string name;                        ///< as given
  std::optional<gpt::ModelConfig> config;  ///< none for a count
  ModelSize size;                          ///< on one tensor-parallel rank
};

/// A strategy's plan; or why the engine would refuse the budgets.
struct PlannedStrategy {
  Strategy strategy;
  RankMemory memory;           ///< at rest only, for a count
  std::optional<RunPlan> run;  ///< none for a count, and where it is refused
  std::string refusal;
};

struct PlanCommand {
  PlannedModel model;
  WorldSize world;
  MeshShape mesh;
  std::string warning;  ///< of the mesh; empty: none
  Recipe recipe;
  Placement placement;
  int slots = 2;
  std::uint64_t reduce_bucket_count = 0;
  TrainOptions run;  ///< the same as `train` would have it; budgets of 0 were not given
  std::vector<Strategy> strategies;  ///< one asked for, or all stages
  Quantization quantization;
  gpt::RunShape shape;    ///< what tensor-parallel ranks exchange depends on
  int accumulate = 1;     ///< micro-batches in a step
  bool memory = true;     ///< show bytes held
  bool traffic = true;    ///< show bytes sent
  std::string json_path;  ///< empty: the table
};

/// Errors: UsageError. Asks nothing of the world.
PlanCommand read_plan(const Settings& settings);

/// For a run whose micro-batches go unit by unit.
TrafficRequest traffic_request(const PlanCommand& command, const Strategy& strategy,
                               const Quantization& quantization);

int plan(const PlanCommand& command);

}  // namespace ziggurat::cli
