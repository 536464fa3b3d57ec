// SPDX-License-Identifier: Apache-2.0
// integrations/cli/config.cc: `ziggurat config`, which prints every setting in force and where it
// came from.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "integrations/cli/commands.h"
#include "integrations/cli/output_file.h"

namespace ziggurat::cli {
namespace {

nlohmann::json as_json(const SettingValue& value) {
  return std::visit(
      [](const auto& held) -> nlohmann::json {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>, std::monostate>)
          return nullptr;
        else
          return held;
      },
      value);
}

}  // namespace

int show_config(const Settings& settings) {
  const TrainOptions run = read_run_options(settings);
  nlohmann::json all = nlohmann::json::object();
  std::size_t name_columns = 0;
  for (const Setting& setting : train_settings())
    name_columns = std::max(name_columns, setting.name.size());
  for (const SettingOf<TrainOptions>& setting : train_table()) {
    const SettingValue value = setting.read(run);
    all[setting.name] = {{"value", as_json(value)}, {"from", settings.origin(setting.name)}};
    if (!run.json_path.empty()) continue;
    const std::string text = to_text(setting.kind, value);
    fmt::print("{:<{}}  {:<40}  {}\n", setting.name, name_columns, text.empty() ? "-" : text,
               settings.origin(setting.name));
  }
  const nlohmann::json report{{"settings", std::move(all)}, {"notes", notes_of(settings, run)}};
  write_output(run.json_path, report.dump(1) + "\n");
  return 0;
}

}  // namespace ziggurat::cli
