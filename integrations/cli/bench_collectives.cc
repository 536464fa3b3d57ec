// SPDX-License-Identifier: Apache-2.0
// integrations/cli/bench_collectives.cc: `ziggurat bench collectives`, which measures how fast
// ranks exchange data. Without a launcher it starts the ranks itself; under a launcher it is one of
// the ranks.
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/bytes.h"
#include "collectives/rank_options.h"
#include "core/engine/runtime.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/output_file.h"
#include "integrations/measure/collectives_suite.h"

namespace ziggurat::cli {

std::span<const Setting> bench_collectives_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"nproc", kInteger, "2", "N",
       "number of ranks to start; under a launcher, the launcher's ranks are measured"},
      {"largest", kSize, "64MiB", "SIZE",
       "largest message; sizes begin at 4 KiB and grow by a factor of 16"},
      {"rounds", kInteger, "7", "N",
       "how often to measure each size; figures are medians of these rounds"},
      {"back-end", kText, "auto,tcp", "LIST",
       "back ends to measure, separated by commas: auto (on one machine, ranks read each other's "
       "memory), tcp, mpi (under mpirun), nccl"},
      {"json", kText, "", "FILE", "write every figure to FILE as JSON"},
  };
  return table;
}

namespace {

std::vector<Collectives> back_ends_of(const std::string& list) {
  std::vector<Collectives> found;
  std::stringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    found.push_back(collectives_of(word, "back-end"));
  }
  return found;
}

}  // namespace

BenchCollectivesCommand read_bench_collectives(const Settings& settings) {
  BenchCollectivesCommand command;
  command.ranks = static_cast<int>(settings.integer("nproc", {.min = 2, .max = 1024}));
  command.largest_bytes = settings.size("largest", 4 * kKiB);
  command.rounds = static_cast<int>(settings.integer("rounds", {.min = 1, .max = 1000}));
  command.back_ends = settings.text("back-end");
  read_with(settings, "back-end", back_ends_of);
  command.json_path = settings.text("json");
  return command;
}

int bench_collectives(const BenchCollectivesCommand& command) {
  const RankOptions ranks = rank_options();
  if (ranks.rank == 0) require_writable(command.json_path);
  if (ranks.world_size == 1) {
    LaunchCommand launched;
    launched.ranks = command.ranks;
    launched.arguments = {std::filesystem::read_symlink("/proc/self/exe").string(),
                          "bench",
                          "collectives",
                          "--largest",
                          std::to_string(command.largest_bytes),
                          "--rounds",
                          std::to_string(command.rounds),
                          "--back-end",
                          command.back_ends};
    if (!command.json_path.empty()) {
      launched.arguments.insert(launched.arguments.end(), {"--json", command.json_path});
    }
    return launch(launched);
  }
  const auto runtime = Runtime::create({});
  const auto rows = measure::run_collectives_bench(runtime->reactor, *runtime->workers, ranks,
                                                   {.back_ends = back_ends_of(command.back_ends),
                                                    .largest_bytes = command.largest_bytes,
                                                    .rounds = command.rounds});
  if (ranks.rank != 0) return 0;
  Console console;
  console.line(fmt::format("{} ranks ({}), {} workers each", ranks.world_size, ranks.source,
                           runtime->workers->threads()));
  for (const std::string& line : measure::collectives_table(rows)) console.line(line);
  const nlohmann::json all{{"ranks", ranks.world_size},
                           {"workers", runtime->workers->threads()},
                           {"rows", measure::collectives_json(rows)}};
  write_output(command.json_path, all.dump(2) + "\n");
  return 0;
}

}  // namespace ziggurat::cli
