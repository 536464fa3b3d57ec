// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_options.cc: the table of the settings about checkpoints, and which of
// them need another setting.
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
                .help = "write checkpoints into DIR, each in a directory of its own, while "
                        "training goes on: at the end, when interrupted, on SIGUSR1, and as often "
                        "as the next two settings say",
                .at_resume = AtResume::kSilent}),
      In::integer(
          "checkpoint_every", &C::every, {},
          {.values = "N", .help = "make a checkpoint every N steps; 0 makes none by steps"}),
      In::number(
          "checkpoint_every_minutes", &C::every_minutes, {},
          {.values = "M", .help = "also make a checkpoint every M minutes; 0 makes none by time"}),
      In::size(
          "checkpoint_bandwidth", &C::bandwidth_bytes_per_s, 0,
          {.values = "SIZE",
           .help =
               "most bytes of a checkpoint that each rank writes in a second; 0 means no limit"}),
      In::number("checkpoint_stall_max", &C::stall_max_s, {.min = 0.001},
                 {.values = "S",
                  .help = "seconds that training waits in all for a checkpoint's drive before the "
                          "checkpoint is given up"}),
      In::integer("keep_last", &C::keep_last, {},
                  {.values = "N", .help = "keep the newest N checkpoints; 0 keeps all"}),
      In::integer(
          "keep_every", &C::keep_every, {},
          {.values = "N", .help = "also keep the checkpoints of steps that are multiples of N"}),
      In::truth(
          "keep_best", SettingKind::kSwitch, &C::keep_best,
          {.help = "also keep the checkpoint with the lowest held-out loss (see --eval-every)"}),
      In::text(
          "load", &C::load,
          {.values = "DIR",
           .help = "begin with the state of a checkpoint, whatever ranks and formats it was saved "
                   "with; if the store exists already, training goes on from the store instead",
           .at_resume = AtResume::kSilent}),
      In::truth("load_weights", SettingKind::kSwitch, &C::load_weights,
                {.help = "load only the weights of --load, so that training begins at step 0",
                 .at_resume = AtResume::kSilent}),
      In::parsed("load_rename", &C::load_rename, parse_load_renames,
                 [](const std::vector<LoadRename>& renames) { return to_text(renames); },
                 {.values = "OLD=NEW[;..]",
                  .help = "rename parameters of --load: OLD in the checkpoint becomes NEW in this "
                          "model; a * on both sides stands for the same characters",
                  .at_resume = AtResume::kSilent}),
      In::truth(
          "load_partial", SettingKind::kSwitch, &C::load_partial,
          {.help =
               "let parameters that --load lacks keep their initial values, and leave out those "
               "that this model lacks; both are listed. Without this switch they are errors",
           .at_resume = AtResume::kSilent}),
  };
  return table;
}

void check_checkpoints(const Settings& settings, const CheckpointOptions& options) {
  const auto needs = [&](const char* name, bool given, const char* other, const char* why) {
    if (settings.given(name) && !given)
      throw UsageError(fmt::format("{} has no effect, because {}; give {} too",
                                   settings.described(name), why, other));
  };
  const bool saves = !options.directory.empty();
  for (const char* name : {"checkpoint_every", "checkpoint_every_minutes", "checkpoint_bandwidth",
                           "checkpoint_stall_max", "keep_last", "keep_every", "keep_best"}) {
    needs(name, saves, "--checkpoint-dir", "no checkpoint is made without a directory");
  }
  for (const char* name : {"keep_every", "keep_best"})
    needs(name, options.keep_last > 0, "--keep-last", "all checkpoints are kept");
  for (const char* name : {"load_weights", "load_rename", "load_partial"})
    needs(name, !options.load.empty(), "--load", "nothing is loaded");
}

}  // namespace ziggurat::cli
