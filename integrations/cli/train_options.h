// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_options.h: the settings of `ziggurat train`: what a run is, beside the
// engine's own.
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

/// Defaults are the demo's: GPT-2 small in budgets far too small for it.
struct TrainOptions {
  TrainOptions() { engine.host_budget_bytes = 384 * kMiB; }

  /// What the engine is opened with, but for what only the run knows: its part of the layers, what
  /// the trainer takes of the device, the run's identity.
  EngineConfig engine;

  gpt::ModelConfig model;  ///< whole: which part is this rank's is not known yet
  std::string data;
  std::string store;         ///< as given, for messages; engine.store has its directories
  std::uint64_t steps = 60;  ///< total; a resumed run does the rest
  gpt::RunShape shape;
  ScheduleOptions schedule;
  LossScaleOptions loss_scale;
  CheckpointOptions checkpoint;

  std::uint64_t eval_every = 0;  ///< 0: at the end only
  std::uint64_t seed = 1;
  std::uint64_t device_bytes = 160 * kMiB;
  std::size_t threads = 0;                       ///< 0: one per physical core
  int nproc = 1;                                 ///< ranks that this machine runs
  Collectives collectives = Collectives::kAuto;  ///< and what ZIGGURAT_RANKS says

  std::string trace_path;
  std::string json_path;
  bool print_loss_bits = false;
  bool per_rank = false;  ///< in the table at the end
};

/// The run's settings and the engine's, in the order of the help.
std::span<const SettingOf<TrainOptions>> train_table();
/// Their names alone.
std::span<const Setting> train_settings();

/// Reads and checks every setting. Errors: UsageError. Asks nothing of the world.
TrainOptions read_train_options(const Settings& settings);
/// The same, also without data and a store.
TrainOptions read_run_options(const Settings& settings);
/// What was given and changes nothing: keys of the file, and settings that mean nothing on so few
/// ranks or with state placed so.
std::vector<std::string> notes_of(const Settings& settings, const TrainOptions& options);

/// What may change when a run goes on, by flag, as text: a change is reported. `threads` are those
/// it has.
std::map<std::string, std::string> changeable_settings(const TrainOptions& options,
                                                       std::size_t threads);

}  // namespace ziggurat::cli
