// SPDX-License-Identifier: Apache-2.0
// integrations/c/settings_json.cc: flat JSON over a table of settings.
#include "integrations/c/settings_json.h"

#include <fmt/format.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/closest.h"
#include "core/engine/engine_settings.h"
#include "integrations/c/open_progress.h"
#include "integrations/c/wrong.h"
#include "integrations/deepspeed/config_json.h"
#include "integrations/deepspeed/setting_json.h"

namespace ziggurat {
namespace {

using nlohmann::json;

/// What a key is, in the caller's words.
std::string described(const ConfigSetting& given) {
  return fmt::format("setting \"{}\": {}", given.path, given.value.dump().substr(0, 60));
}

/// Writes what `text` says into `config`, by `table`; keys that it lacks go to `other`, which is
/// false for one that nobody knows.
template <class Config, class Table>
void apply(std::string_view text, Config& config, const Table& table,
           const std::function<bool(const ConfigSetting&)>& other = {}) {
  ConfigContext context;
  for (const auto& setting : table) context.names.push_back(setting.name);
  for (const ConfigSetting& given : read_config(text, "settings", context).settings) {
    if (other && other(given)) continue;
    const auto found = std::ranges::find(table, underscored(given.name), &Setting::name);
    if (found == std::end(table)) {
      if (given.assumed) continue;
      const std::string meant = closest(underscored(given.name), context.names);
      throw wrong(fmt::format("settings: unknown key \"{}\"{}", given.path,
                              meant.empty() ? "" : fmt::format("; did you mean \"{}\"?", meant)));
    }
    const std::optional<JsonSetting> read = read_setting(given.value, found->kind);
    if (!read)
      throw wrong(fmt::format("{}: it must be {}", described(given), expected_json(found->kind)));
    try {
      found->write(config, read->typed ? *read->typed : parse_setting(found->kind, read->text));
    } catch (const Error& error) {
      throw wrong(described(given) + error.what());
    }
  }
}

/// A directory, or several.
std::vector<StoreDirectory> store_of(const ConfigSetting& given) {
  const json list = given.value.is_array() ? given.value : json::array({given.value});
  std::vector<StoreDirectory> store;
  for (const json& path : list) {
    if (!path.is_string() || path.get<std::string>().empty())
      throw wrong(fmt::format("{}: it must be a directory, or a list of them", described(given)));
    store.push_back({.path = path.get<std::string>()});
  }
  return store;
}

std::string run_of(const ConfigSetting& given) {
  if (!given.value.is_string()) throw wrong(fmt::format("{}: it must be a text", described(given)));
  return given.value.get<std::string>();
}

}  // namespace

EngineConfig engine_config_of(std::string_view text) {
  EngineConfig config;
  config.clip_norm = 0;
  apply(text, config, engine_settings(), [&](const ConfigSetting& given) {
    if (given.name == "store") {
      config.store = store_of(given);
    } else if (given.name == "run") {
      config.run_identity = run_of(given);
    } else if (given.name == "progress") {
      if (!given.value.is_boolean())
        throw wrong(fmt::format("{}: it must be true or false", described(given)));
      if (given.value.get<bool>()) config.progress = open_progress();
    } else {
      return false;
    }
    return true;
  });
  return config;
}

std::size_t threads_of(std::string_view text) {
  struct Threads {
    std::size_t threads = 0;
  };
  using In = SettingsIn<Threads>;
  const std::vector<SettingOf<Threads>> table{
      In::integer("threads", &Threads::threads, {.min = 0, .max = 4096},
                  {.values = "N", .help = "workers; 0: this process's share of the machine"})};
  Threads config;
  apply(text, config, table);
  return config.threads;
}

}  // namespace ziggurat
