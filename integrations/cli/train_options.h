// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_options.h: the settings of `ziggurat train`: their table, their types,
// their limits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/rank_options.h"
#include "core/engine/engine_config.h"
#include "core/sharding/strategy.h"
#include "integrations/cli/loss_scale_options.h"
#include "integrations/cli/schedule_options.h"
#include "integrations/cli/settings.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {

/// One entry a flag, in the order of the help. Defaults are the demo's: GPT-2 small in budgets far
/// too small for it.
std::span<const Setting> train_settings();

/// --zero-stage, --strategy, --shard-group and --hpz, as far as they were given. Errors:
/// UsageError.
StrategyRequest strategy_request(const Settings& settings);
/// --quantized-weights and --quantized-gradients. Errors: UsageError.
Quantization read_quantization(const Settings& settings);

struct TrainOptions {
  gpt::ModelConfig model;  ///< part.ranks is --tp; which of them this is, is not known yet
  std::string data;
  std::string store;                              ///< as given, for messages
  std::vector<StoreDirectory> store_directories;  ///< what it names
  std::uint64_t steps = 0;                        ///< total; a resumed run does the rest
  gpt::RunShape shape;

  ScheduleOptions schedule;
  LossScaleOptions loss_scale;
  double clip_norm = 0;
  OptimizerConfig optimizer;
  std::vector<ParamGroup> param_groups;
  std::string param_groups_text;

  std::uint64_t eval_every = 0;  ///< 0: at the end only
  std::uint64_t seed = 0;
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  Placement placement;
  int slots = 2;
  std::size_t threads = 0;                       ///< 0: one per physical core
  int nproc = 1;                                 ///< ranks that this machine runs
  Collectives collectives = Collectives::kAuto;  ///< and what ZIGGURAT_RANKS says
  StrategyRequest strategy;                      ///< resolved once the ranks are known
  Quantization quantization;
  int ranks_per_node = 0;             ///< for it; 0: as the launcher says
  std::optional<DType> reduce_dtype;  ///< the model's if not given
  std::uint64_t reduce_bucket_elements = 0;
  std::uint64_t prefetch_elements = 0;
  EngineConfig::Resume resume = EngineConfig::Resume::kAuto;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;

  std::string trace_path;
  std::string json_path;
  bool print_loss_bits = false;
  bool per_rank = false;  ///< in the table at the end
};

/// Batch, context, micro-batches of a step, what is kept of activations and who has which rows.
/// Errors: UsageError.
gpt::RunShape read_run_shape(const Settings& settings);

/// Reads and checks every setting. Errors: UsageError. Asks nothing of the world.
TrainOptions read_train_options(const Settings& settings);

}  // namespace ziggurat::cli
