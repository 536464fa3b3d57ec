// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_options.cc: the table, and what needs what.
#include "integrations/cli/checkpoint_options.h"

#include <fmt/format.h>

#include <vector>

namespace ziggurat::cli {

std::span<const SettingOf<CheckpointOptions>> checkpoint_settings() {
  using In = SettingsIn<CheckpointOptions>;
  using C = CheckpointOptions;
  static const std::vector<SettingOf<C>> table{
      In::text("checkpoint_dir", &C::directory,
               {.values = "DIR",
                .help = "write checkpoints there, one a directory, while training goes on: at the "
                        "end, when interrupted, on SIGUSR1, and as often as the next two say",
                .at_resume = AtResume::kSilent}),
      In::integer("checkpoint_every", &C::every, {},
                  {.values = "N", .help = "make a checkpoint every N steps; 0: not by steps"}),
      In::number("checkpoint_every_minutes", &C::every_minutes, {},
                 {.values = "M", .help = "make a checkpoint every M minutes too; 0: not by time"}),
      In::size("checkpoint_bandwidth", &C::bandwidth_bytes_per_s, 0,
               {.values = "SIZE",
                .help = "bytes of a checkpoint that each rank writes in a second; 0: no limit"}),
      In::number("checkpoint_stall_max", &C::stall_max_s, {.min = 0.001},
                 {.values = "S",
                  .help = "seconds that training waits in all for a checkpoint's drive before the "
                          "checkpoint is given up"}),
      In::integer("keep_last", &C::keep_last, {},
                  {.values = "N", .help = "keep the newest N checkpoints; 0: all"}),
      In::integer("keep_every", &C::keep_every, {},
                  {.values = "N", .help = "keep the checkpoints of steps that N divides too"}),
      In::truth("keep_best", SettingKind::kSwitch, &C::keep_best,
                {.help = "keep the checkpoint with the least held-out loss (--eval-every) too"}),
      In::text("load", &C::load,
               {.values = "DIR",
                .help = "begin with a checkpoint's state, whatever ranks and formats it was saved "
                        "with; a store that exists is preferred to it",
                .at_resume = AtResume::kSilent}),
      In::truth("load_weights", SettingKind::kSwitch, &C::load_weights,
                {.help = "load only the weights of --load: training begins at step 0",
                 .at_resume = AtResume::kSilent}),
      In::parsed("load_rename", &C::load_rename, parse_load_renames,
                 [](const std::vector<LoadRename>& renames) { return to_text(renames); },
                 {.values = "OLD=NEW[;..]",
                  .help = "rename parameters of --load: OLD there is NEW in this model; a * on "
                          "both sides stands for the same characters",
                  .at_resume = AtResume::kSilent}),
      In::truth("load_partial", SettingKind::kSwitch, &C::load_partial,
                {.help = "parameters that --load lacks keep their initial values, those that this "
                         "model lacks are left out, and both are listed; otherwise they are errors",
                 .at_resume = AtResume::kSilent}),
  };
  return table;
}

void check_checkpoints(const Settings& settings, const CheckpointOptions& options) {
  const auto needs = [&](const char* name, bool given, const char* other, const char* why) {
    if (settings.given(name) && !given)
      throw UsageError(fmt::format("{}: {}: give {} too", settings.described(name), why, other));
  };
  const bool saves = !options.directory.empty();
  for (const char* name : {"checkpoint_every", "checkpoint_every_minutes", "checkpoint_bandwidth",
                           "checkpoint_stall_max", "keep_last", "keep_every", "keep_best"}) {
    needs(name, saves, "--checkpoint-dir", "no checkpoint is made without a directory");
  }
  for (const char* name : {"keep_every", "keep_best"})
    needs(name, options.keep_last > 0, "--keep-last", "all checkpoints stay");
  for (const char* name : {"load_weights", "load_rename", "load_partial"})
    needs(name, !options.load.empty(), "--load", "nothing is loaded");
}

}  // namespace ziggurat::cli
