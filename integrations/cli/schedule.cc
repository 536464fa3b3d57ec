// SPDX-License-Identifier: Apache-2.0
// integrations/cli/schedule.cc: `ziggurat schedule`, which shows the learning rate of every step
// before the run.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "integrations/cli/commands.h"

namespace ziggurat::cli {
namespace {

/// The most rows of the table: the first step, the last step, and steps between them.
constexpr std::uint64_t kRowsMax = 25;
constexpr std::size_t kBarColumns = 48;

void write_json(const ScheduleCommand& command) {
  nlohmann::json steps = nlohmann::json::array();
  for (std::uint64_t i = 0; i < command.steps; ++i) {
    const ScheduledStep step = scheduled(command.schedule.schedule, i);
    nlohmann::json row{{"step", i + 1}, {"learning_rate", step.learning_rate}};
    if (step.betas) row["betas"] = {step.betas->beta1, step.betas->beta2};
    steps.push_back(std::move(row));
  }
  const nlohmann::json report{{"schedule", command.schedule.name},
                              {"parameters", command.schedule.parameters},
                              {"steps", std::move(steps)}};
  std::ofstream file(command.json_path);
  file << report.dump() << '\n';
  file.close();
  if (!file) throw system_error(errno, fmt::format("cannot write --json {}", command.json_path));
}

}  // namespace

ScheduleCommand read_show_schedule(const Settings& settings) {
  TrainOptions run;
  settings.write_to(run, train_table());
  make_schedule(run.schedule, settings, run.steps);
  return {.schedule = run.schedule, .steps = run.steps, .json_path = run.json_path};
}

int show_schedule(const ScheduleCommand& command) {
  if (!command.json_path.empty()) {
    write_json(command);
    return 0;
  }
  double highest = 0;
  for (std::uint64_t i = 0; i < command.steps; ++i)
    highest = std::max(highest, scheduled(command.schedule.schedule, i).learning_rate);
  const std::uint64_t rows = std::min(kRowsMax, command.steps);
  const bool betas = scheduled(command.schedule.schedule, 0).betas.has_value();
  fmt::print("{:>10}  {:<12}{}\n", "step", "lr", betas ? "  beta1 " : "");
  for (std::uint64_t row = 0; row < rows; ++row) {
    const std::uint64_t i = rows == 1 ? 0 : row * (command.steps - 1) / (rows - 1);
    const ScheduledStep step = scheduled(command.schedule.schedule, i);
    const double share = highest > 0 ? step.learning_rate / highest : 0;
    const auto columns = static_cast<std::size_t>(share * kBarColumns + 0.5);
    fmt::print("{:>10}  {:<12.6g}{}  {}\n", i + 1, step.learning_rate,
               step.betas ? fmt::format("  {:.4f}", step.betas->beta1) : "",
               std::string(columns, '#'));
  }
  return 0;
}

}  // namespace ziggurat::cli
