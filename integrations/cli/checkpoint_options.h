// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_options.h: the settings of `ziggurat train` that are about
// checkpoints: when one leaves, which stay, and what a run begins from.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/load_options.h"
#include "integrations/cli/settings.h"

namespace ziggurat::cli {

struct CheckpointOptions {
  std::string directory;    ///< empty: none is made
  std::uint64_t every = 0;  ///< steps; 0: at the end, and when asked for
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

/// Errors: UsageError for one that means nothing without another.
void check_checkpoints(const Settings& settings, const CheckpointOptions& options);

}  // namespace ziggurat::cli
