// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_options.h: the settings of `ziggurat train` about checkpoints: when
// one is made, which are kept, and which one a run begins from.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/load_options.h"
#include "integrations/cli/settings.h"

namespace ziggurat::cli {

struct CheckpointOptions {
  std::string directory;    ///< empty if no checkpoint is made
  std::uint64_t every = 0;  ///< steps between checkpoints; 0 if the count of steps makes none
  double every_minutes = 0;
  std::uint64_t bandwidth_bytes_per_s = 0;
  double stall_max_s = 60;
  std::uint64_t keep_last = 0;
  std::uint64_t keep_every = 0;
  bool keep_best = false;
  std::string load;
  bool load_weights = false;
  std::vector<LoadRename> load_rename;
  bool load_partial = false;
};

std::span<const SettingOf<CheckpointOptions>> checkpoint_settings();

/// Checks that each setting that was given has the other setting that it needs. Errors: UsageError
/// naming both.
void check_checkpoints(const Settings& settings, const CheckpointOptions& options);

}  // namespace ziggurat::cli
