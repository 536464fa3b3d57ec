// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_options.h: the settings of `ziggurat train`: those of a run, and the
// engine's.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "collectives/rank_options.h"
#include "core/engine/engine_config.h"
#include "integrations/cli/checkpoint_options.h"
#include "integrations/cli/loss_scale_options.h"
#include "integrations/cli/schedule_options.h"
#include "integrations/cli/settings.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {

/// The settings of a run. The defaults are those of the demo: GPT-2 small in budgets far too small
/// for it.
struct TrainOptions {
  TrainOptions() { engine.host_budget_bytes = 384 * kMiB; }

  /// The engine's settings. The run adds what only it knows: this rank's part of the layers, the
  /// device memory that the trainer takes, and the run's identity.
  EngineConfig engine;

  gpt::ModelConfig model;  ///< the whole model, since this rank's part is not known yet
  std::string data;
  std::string store;         ///< the text as given, for messages; engine.store has its directories
  std::uint64_t steps = 60;  ///< steps in total; a resumed run makes the remaining ones
  gpt::RunShape shape;
  ScheduleOptions schedule;
  LossScaleOptions loss_scale;
  CheckpointOptions checkpoint;

  std::uint64_t eval_every = 0;  ///< 0 if only at the end
  std::uint64_t seed = 1;
  std::uint64_t device_bytes = 160 * kMiB;       ///< 0 if `auto` chooses it
  std::size_t threads = 0;                       ///< 0 for one per physical core
  int nproc = 1;                                 ///< number of ranks that this machine runs
  Collectives collectives = Collectives::kAuto;  ///< kAuto leaves it to ZIGGURAT_RANKS

  std::string trace_path;
  std::string json_path;
  bool print_loss_bits = false;
  bool per_rank = false;  ///< print a line for each rank at the end
};

/// Returns the settings of the run and of the engine, in the order of the help.
std::span<const SettingOf<TrainOptions>> train_table();
/// Returns the settings of train_table() without the struct that they are written into.
std::span<const Setting> train_settings();

/// Reads and checks every setting, without opening any file. Errors: UsageError.
TrainOptions read_train_options(const Settings& settings);
/// Reads and checks the settings of a run that may have neither data nor a store. Errors:
/// UsageError.
TrainOptions read_run_options(const Settings& settings);
/// Returns notes on what was given but changes nothing: keys of the file, and settings that have no
/// effect with this number of ranks or this placement.
std::vector<std::string> notes_of(const Settings& settings, const TrainOptions& options);

/// Returns the settings that may change when a run is resumed, as text by flag, so that a change
/// can be reported. `threads` is the number of workers that the run has.
std::map<std::string, std::string> changeable_settings(const TrainOptions& options,
                                                       std::size_t threads);

}  // namespace ziggurat::cli
