// SPDX-License-Identifier: Apache-2.0
// integrations/c/deepspeed.cc: reads DeepSpeed's config for a script of any language: what it means
// to the engine, and what the script must honour itself.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/engine/engine_settings.h"
#include "integrations/c/c_call.h"
#include "integrations/c/wrong.h"
#include "integrations/c/ziggurat.h"
#include "integrations/deepspeed/config_json.h"
#include "integrations/deepspeed/setting_json.h"

namespace {

using nlohmann::json;
using ziggurat::ConfigContext;
using ziggurat::ConfigFile;
using ziggurat::ConfigSetting;
using ziggurat::Setting;
using ziggurat::wrong;

constexpr int kRanksMax = 1 << 20;

/// {"world_size": 2, "settings": ["host_memory", ..]}
ConfigContext context_of(const std::string& text) {
  const json given = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const json ranks = given.is_object() ? given.value("world_size", json(1)) : json();
  const json names = given.is_object() ? given.value("settings", json::array()) : json();
  const bool strings = names.is_array() && std::ranges::all_of(names, [](const json& name) {
                         return name.is_string();
                       });
  if (!ranks.is_number_unsigned() || ranks < 1 || ranks > kRanksMax || !strings)
    throw wrong("context must be JSON like {\"world_size\": 2, \"settings\": [\"host_memory\"]}");
  ConfigContext context;
  context.script = true;
  context.launched_ranks = ranks.get<int>();
  context.names = names.get<std::vector<std::string>>();
  return context;
}

/// Checks a value by the engine's table of settings, before there is an engine.
void check(const ConfigSetting& given, const std::string& file) {
  const auto table = ziggurat::engine_settings();
  const auto found = std::ranges::find(table, given.name, &Setting::name);
  if (found == table.end()) return;
  const std::string described =
      fmt::format("{}: \"{}\" {}", file, given.path, given.value.dump().substr(0, 60));
  const auto read = ziggurat::read_setting(given.value, found->kind);
  if (!read)
    throw wrong(fmt::format("{}: it must be {}", described, ziggurat::expected_json(found->kind)));
  ziggurat::EngineConfig config;
  try {
    found->write(config,
                 read->typed ? *read->typed : ziggurat::parse_setting(found->kind, read->text));
  } catch (const ziggurat::Error& error) {
    throw wrong(described + error.what());
  }
}

json as_json(const ConfigFile& read) {
  const auto all = [](const std::vector<ConfigSetting>& settings) {
    json object = json::object();
    for (const ConfigSetting& setting : settings) {
      object[setting.name] = {
          {"value", setting.value}, {"path", setting.path}, {"assumed", setting.assumed}};
    }
    return object;
  };
  return {{"settings", all(read.settings)},
          {"handed", all(read.handed)},
          {"given", read.given},
          {"notes", read.notes}};
}

}  // namespace

ziggurat_status ziggurat_deepspeed_config(const char* config, const char* name, const char* context,
                                          char* text, uint64_t capacity_bytes,
                                          uint64_t* needed_bytes) {
  return ziggurat::guarded([&] {
    const ConfigContext its = context_of(ziggurat::required(context, "context"));
    const std::string file = ziggurat::required(name, "name");
    const ConfigFile read = ziggurat::read_config(ziggurat::required(config, "config"), file, its);
    for (const ConfigSetting& setting : read.settings) {
      const bool callers = std::ranges::find(its.names, setting.name) != its.names.end();
      if (!callers && setting.name != "placement") check(setting, file);
    }
    ziggurat::give_text(as_json(read).dump(-1, ' ', false, json::error_handler_t::replace), text,
                        capacity_bytes, needed_bytes);
  });
}
