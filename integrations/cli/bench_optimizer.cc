// SPDX-License-Identifier: Apache-2.0
// integrations/cli/bench_optimizer.cc: `ziggurat bench optimizer`, which measures how near the
// optimizer comes to the speed of memory, in every format of state.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "base/numerics/simd_target.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/output_file.h"

namespace ziggurat::cli {

std::span<const Setting> bench_optimizer_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"params", kText, "", "N",
       "number of parameters (1B, 350M, ...); if not given, 100M, or fewer if memory is short"},
      {"threads", kInteger, "0", "N",
       "measure with 1 to N threads; 0 means one thread for each physical core"},
      {"format", kText, "all", "NAME",
       fmt::format("format of the state to measure: all, {}",
                   fmt::join(state_format_names(), ", "))},
      {"optimizer", kText, "adamw", "NAME",
       fmt::format("optimizer to measure: {}", fmt::join(optimizer_names(), ", "))},
      {"isa", kText, "best", "NAME",
       "instruction set to use: best, all, or a name that `ziggurat doctor` lists"},
      {"rounds", kInteger, "7", "N",
       "how often to measure each row; figures are medians of these rounds"},
      {"json", kText, "", "FILE", "write all figures, with every round, to FILE as JSON"},
  };
  return table;
}

namespace {

/// Returns the words of `first`, followed by `words`.
std::vector<std::string_view> with(std::vector<std::string_view> first,
                                   std::span<const std::string_view> words) {
  first.insert(first.end(), words.begin(), words.end());
  return first;
}

constexpr double kParamsMax = 1e12;

}  // namespace

BenchOptimizerCommand read_bench_optimizer(const Settings& settings) {
  BenchOptimizerCommand command;
  measure::OptimizerBenchOptions& options = command.options;
  if (!settings.text("params").empty()) {
    const std::optional<double> params = parse_count(settings.text("params"));
    if (!params || !(*params >= 1) || *params > kParamsMax)
      throw UsageError(fmt::format("{}: give a count of parameters from 1 to 1000B, like 100M",
                                   settings.described("params")));
    options.params = static_cast<std::uint64_t>(*params);
  }
  options.threads = static_cast<std::size_t>(settings.integer("threads", {.min = 0, .max = 4096}));
  const std::string format = settings.choice("format", with({"all"}, state_format_names()));
  for (const std::string_view name : state_format_names()) {
    if (format == "all" || format == name) options.formats.push_back(*parse_state_format(name));
  }
  options.optimizer = *parse_optimizer(settings.choice("optimizer", optimizer_names()));
  const std::vector<std::string_view> targets = simd_targets();
  const std::string isa = settings.choice("isa", with({"best", "all"}, targets));
  if (isa == "all") {
    options.targets.assign(targets.begin(), targets.end());
  } else if (isa != "best") {
    options.targets = {isa};
  }
  options.rounds = static_cast<std::uint32_t>(settings.integer("rounds", {.min = 1, .max = 1000}));
  command.json_path = settings.text("json");
  return command;
}

int bench_optimizer(const BenchOptimizerCommand& command) {
  Console console;
  require_writable(command.json_path);
  const measure::Progress progress{[&](const std::string& text) { console.line(text); },
                                   [&](const std::string& text) { console.live(text); }};
  const measure::OptimizerBenchResult result =
      measure::run_optimizer_bench(command.options, progress);
  for (const std::string& line : measure::optimizer_table(result)) console.line(line);
  write_output(command.json_path, measure::optimizer_json(result));
  return 0;
}

}  // namespace ziggurat::cli
