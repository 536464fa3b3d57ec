// SPDX-License-Identifier: Apache-2.0
// integrations/cli/bench_collectives.cc: `ziggurat bench collectives`: how fast ranks exchange. On
// its own it starts ranks of itself; under a launcher it is one of them.
#include <fmt/format.h>

#include <filesystem>

#include "base/bytes.h"
#include "collectives/rank_options.h"
#include "core/engine/runtime.h"
#include "integrations/bench/collectives_suite.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"

namespace ziggurat::cli {

std::span<const Setting> bench_collectives_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"nproc", kInteger, "2", "N", "ranks to start; under a launcher, those that it started"},
      {"largest", kSize, "64MiB", "SIZE", "sizes go from 4 KiB by 16 up to this one"},
      {"rounds", kInteger, "7", "N", "figures are medians"},
  };
  return table;
}

BenchCollectivesCommand read_bench_collectives(const Settings& settings) {
  BenchCollectivesCommand command;
  command.ranks = static_cast<int>(settings.integer("nproc", {.min = 2, .max = 1024}));
  command.largest_bytes = settings.size("largest", 4 * kKiB);
  command.rounds = static_cast<int>(settings.integer("rounds", {.min = 1, .max = 1000}));
  return command;
}

int bench_collectives(const BenchCollectivesCommand& command) {
  const RankOptions ranks = rank_options();
  if (ranks.world_size == 1) {
    LaunchCommand launched;
    launched.ranks = command.ranks;
    launched.arguments = {std::filesystem::read_symlink("/proc/self/exe").string(),
                          "bench",
                          "collectives",
                          "--largest",
                          std::to_string(command.largest_bytes),
                          "--rounds",
                          std::to_string(command.rounds)};
    return launch(launched);
  }
  const auto runtime = Runtime::create({});
  const auto rows = bench::run_collectives_bench(
      runtime->reactor, *runtime->workers, ranks,
      {.largest_bytes = command.largest_bytes, .rounds = command.rounds});
  if (ranks.rank != 0) return 0;
  Console console;
  console.line(fmt::format("{} ranks ({}), {} workers each", ranks.world_size, ranks.source,
                           runtime->workers->threads()));
  for (const std::string& line : bench::collectives_table(rows)) console.line(line);
  return 0;
}

}  // namespace ziggurat::cli
