// SPDX-License-Identifier: Apache-2.0
// integrations/c/settings_json.cc: reads flat JSON by a table of settings.
#include "integrations/c/settings_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/closest.h"
#include "base/runtime/seconds.h"
#include "core/engine/engine_settings.h"
#include "integrations/c/open_progress.h"
#include "integrations/c/wrong.h"
#include "integrations/deepspeed/config_json.h"
#include "integrations/deepspeed/json_text.h"
#include "integrations/deepspeed/setting_json.h"

namespace ziggurat {
namespace {

using nlohmann::json;

constexpr int kRanksMax = 1 << 20;

/// Names a setting and its value as the caller wrote them.
std::string described(const ConfigSetting& given) {
  return fmt::format("setting \"{}\": {}", given.path, given.value.dump().substr(0, 60));
}

/// Writes what was given into `config`.
template <class Config, class Setting>
void write(const ConfigSetting& given, const Setting& setting, Config& config) {
  const std::optional<JsonSetting> read = read_setting(given.value, setting.kind);
  if (!read)
    throw wrong(fmt::format("{}: it must be {}", described(given), expected_json(setting.kind)));
  try {
    setting.write(config, read->typed ? *read->typed : parse_setting(setting.kind, read->text));
  } catch (const Error& error) {
    throw wrong(described(given) + error.what());
  }
}

/// Reads a flat object. A key whose value is null is as if it was not there.
std::vector<ConfigSetting> settings_in(std::string_view text) {
  const json root = parse_json_text(text, "settings");
  if (!root.is_object()) throw wrong("settings is not a JSON object, {\"key\": value, ...}");
  std::vector<ConfigSetting> all;
  for (const auto& [key, value] : root.items())
    if (!value.is_null()) all.push_back({.name = key, .value = value, .path = key});
  return all;
}

/// Writes what `text` says into `config`, by `table`. Each key first goes to `other`, which returns
/// false if it does not know the key.
template <class Config, class Table>
void apply(std::string_view text, Config& config, const Table& table,
           const std::function<bool(const ConfigSetting&)>& other = {}) {
  std::vector<std::string> names;
  for (const auto& setting : table) names.push_back(setting.name);
  for (const ConfigSetting& given : settings_in(text)) {
    if (other && other(given)) continue;
    const auto found = std::ranges::find(table, underscored(given.name), &Setting::name);
    if (found == std::end(table)) {
      const std::string meant = closest(underscored(given.name), names);
      throw wrong(fmt::format("settings: unknown key \"{}\"{}", given.path,
                              meant.empty() ? "" : fmt::format("; did you mean \"{}\"?", meant)));
    }
    write(given, *found, config);
  }
}

/// Reads a directory, or a list of directories.
std::vector<StoreDirectory> store_of(const ConfigSetting& given) {
  const json list = given.value.is_array() ? given.value : json::array({given.value});
  std::vector<StoreDirectory> store;
  for (const json& path : list) {
    if (!path.is_string() || path.get<std::string>().empty())
      throw wrong(fmt::format("{}: the store must be a directory, or a list of directories",
                              described(given)));
    store.push_back({.path = path.get<std::string>()});
  }
  return store;
}

/// Reads a list of numbers, one for each parameter.
std::vector<std::uint64_t> first_elements_of(const ConfigSetting& given) {
  std::vector<std::uint64_t> firsts;
  const bool is_list = given.value.is_array();
  for (const json& first : is_list ? given.value : json::array({json()})) {
    if (!first.is_number_unsigned())
      throw wrong(fmt::format("{}: the value must be a list of whole numbers", described(given)));
    firsts.push_back(first.get<std::uint64_t>());
  }
  return firsts;
}

WholePlace piece_of(const json& its) {
  WholePlace place;
  if (its.is_null()) return place;
  using Numbers = std::vector<std::int64_t>;
  place.name = its.at("name").get<std::string>();
  place.shape = its.at("shape").get<Numbers>();
  if (its.contains("first")) {
    if (its.contains("box") || !its.at("first").is_number_unsigned())
      throw wrong(
          fmt::format("setting \"pieces\": '{}' has a \"first\" that is no element's "
                      "number, or a box beside it: give one of the two",
                      place.name));
    place.first = its.at("first").get<std::uint64_t>();
  } else {
    place.offsets = its.at("offsets").get<Numbers>();
    place.box = its.at("box").get<Numbers>();
    if (place.box.empty() && !place.shape.empty())
      throw wrong(fmt::format("setting \"pieces\": the box of '{}' has no dimensions", place.name));
  }
  if (place.name.empty())
    throw wrong("setting \"pieces\": a whole parameter has no name: give its name, or null");
  return place;
}

/// Reads a list of places, one for each parameter.
std::vector<WholePlace> pieces_of(const ConfigSetting& given) {
  if (!given.value.is_array())
    throw wrong(fmt::format("{}: the value must be a list", described(given)));
  std::vector<WholePlace> places;
  try {
    for (const json& its : given.value) places.push_back(piece_of(its));
  } catch (const json::exception& error) {
    throw wrong(fmt::format("setting \"pieces\": place {} is not what ziggurat.h describes: {}",
                            places.size(), error.what()));
  }
  return places;
}

/// An entry of the list "wholes", whose fields it reads by name. Errors: kInvalidArgument, which
/// names the entry and the field.
class WholeEntry {
 public:
  WholeEntry(const json& its, std::size_t number) : its_(its), number_(number) {
    if (!its.is_object()) throw wrong_entry("is no object");
    constexpr std::array<std::string_view, 9> kFields{
        "name", "count", "dtype", "unit", "param", "first", "trained", "optional", "quantized"};
    for (const auto& [name, value] : its.items())
      if (std::ranges::find(kFields, name) == kFields.end())
        throw wrong_entry(fmt::format("has an unknown field \"{}\"", name));
  }

  bool has(const char* name) const { return its_.contains(name) && !its_.at(name).is_null(); }
  std::string text(const char* name) const {
    if (has(name) && its_.at(name).is_string()) return its_.at(name).get<std::string>();
    throw wrong_field(name, "a text");
  }
  template <class Number>
  Number number(const char* name) const {
    if (has(name) && its_.at(name).is_number_unsigned()) {
      const auto value = its_.at(name).get<std::uint64_t>();
      if (value <= std::numeric_limits<Number>::max()) return static_cast<Number>(value);
    }
    throw wrong_field(name, "a whole number, and in range");
  }
  bool flag(const char* name, bool otherwise) const {
    if (!has(name)) return otherwise;
    if (its_.at(name).is_boolean()) return its_.at(name).get<bool>();
    throw wrong_field(name, "true or false");
  }
  DType dtype() const {
    if (const std::optional<DType> known = parse_dtype(text("dtype"))) return *known;
    throw wrong_field("dtype", "\"fp32\", \"bf16\" or \"fp16\"");
  }

 private:
  Error wrong_entry(const std::string& why) const {
    return wrong(fmt::format("setting \"wholes\": entry {} {}", number_, why));
  }
  Error wrong_field(const char* name, const char* must_be) const {
    return wrong_entry(fmt::format("has a wrong \"{}\": it is {}, and must be {}", name,
                                   its_.contains(name) ? its_.at(name).dump() : "missing",
                                   must_be));
  }

  const json& its_;
  std::size_t number_;
};

/// Reads a list of whole parameters, of which each rank has slices.
std::vector<WholeParam> wholes_of(const ConfigSetting& given) {
  if (!given.value.is_array())
    throw wrong(fmt::format("{}: the value must be a list", described(given)));
  std::vector<WholeParam> wholes;
  for (const json& its : given.value) {
    const WholeEntry entry(its, wholes.size());
    WholeParam whole{.name = entry.text("name"),
                     .count = entry.number<std::uint64_t>("count"),
                     .dtype = entry.dtype(),
                     .unit = entry.number<std::uint32_t>("unit"),
                     .trained = entry.flag("trained", true),
                     .optional = entry.flag("optional", false),
                     .quantized = entry.flag("quantized", false)};
    if (entry.has("param")) {
      whole.own = entry.number<ParamId>("param");
      whole.first = entry.number<std::uint64_t>("first");
    }
    wholes.push_back(std::move(whole));
  }
  return wholes;
}

std::uint64_t device_of(const ConfigSetting& given) {
  if (given.value.is_number_unsigned() && given.value.get<std::uint64_t>() > 0)
    return given.value.get<std::uint64_t>();
  throw wrong(
      fmt::format("{}: the value must be a handle of ziggurat_device_open()", described(given)));
}

std::string run_of(const ConfigSetting& given) {
  if (!given.value.is_string())
    throw wrong(fmt::format("{}: the value must be a text", described(given)));
  return given.value.get<std::string>();
}

}  // namespace

EmbeddedConfig engine_config_of(std::string_view text) {
  using In = SettingsIn<EmbeddedConfig>;
  const auto device_memory =
      In::size("device_memory", &EmbeddedConfig::device_bytes, 64 * kKiB,
               {.values = "SIZE", .help = "memory for streamed parameters that are acquired"});
  EmbeddedConfig config;
  config.clip_norm = 0;
  EngineConfig& engine = config;
  apply(text, engine, engine_settings(), [&](const ConfigSetting& given) {
    if (given.name == device_memory.name) {
      write(given, device_memory, config);
    } else if (given.name == "device") {
      config.device = device_of(given);
    } else if (given.name == "store") {
      config.store = store_of(given);
    } else if (given.name == "run") {
      config.run_identity = run_of(given);
    } else if (given.name == "first_elements") {
      config.first_elements = first_elements_of(given);
    } else if (given.name == "pieces") {
      config.pieces = pieces_of(given);
    } else if (given.name == "wholes") {
      config.wholes = wholes_of(given);
    } else if (given.name == "progress") {
      if (!given.value.is_boolean())
        throw wrong(fmt::format("{}: the value must be true or false", described(given)));
      if (given.value.get<bool>()) config.progress = open_progress();
    } else {
      return false;
    }
    return true;
  });
  return config;
}

RuntimeSettings runtime_settings_of(std::string_view text) {
  struct Given {
    std::size_t threads = 0;
    std::optional<int> rank;
    std::optional<int> world_size;
    std::string rendezvous;
    std::string secret;
    double connect_timeout_s = 300;
    double call_timeout_s = 600;
  };
  using In = SettingsIn<Given>;
  constexpr NumberRange kSeconds{.min = 0.1, .max = 1e6};
  const std::vector<SettingOf<Given>> table{
      In::integer(
          "threads", &Given::threads, {.min = 0, .max = 4096},
          {.values = "N", .help = "number of workers; 0 for this process's share of the machine"}),
      In::integer("rank", &Given::rank, {.min = 0, .max = kRanksMax - 1},
                  {.values = "R", .help = "this process's number among world_size ranks, from 0"}),
      In::integer("world_size", &Given::world_size, {.min = 1, .max = kRanksMax},
                  {.values = "N", .help = "number of ranks that join"}),
      In::text("rendezvous", &Given::rendezvous,
               {.values = "HOST:PORT", .help = "an address of rank 0's machine"}),
      In::text("secret", &Given::secret,
               {.values = "TEXT", .help = "text that all ranks know; on one host none is needed"}),
      In::number("connect_timeout_s", &Given::connect_timeout_s, kSeconds,
                 {.values = "SECONDS", .help = "how long to wait for all ranks to join"}),
      In::number(
          "call_timeout_s", &Given::call_timeout_s, kSeconds,
          {.values = "SECONDS", .help = "how long all ranks may do no work before a call fails"})};
  Given given;
  apply(text, given, table);
  RuntimeSettings settings{.threads = given.threads, .ranks = {}};
  if (!given.rank && !given.world_size) {
    if (given.rendezvous.empty()) return settings;
    throw wrong(
        "settings: \"rendezvous\" was given without \"rank\" and \"world_size\": give all three");
  }
  if (!given.rank || !given.world_size)
    throw wrong("settings: \"rank\" and \"world_size\" belong together: give both, or neither");
  if (*given.rank >= *given.world_size) {
    throw wrong(fmt::format("setting \"rank\": there is no rank {} among {} ranks: give 0 to {}",
                            *given.rank, *given.world_size, *given.world_size - 1));
  }
  if (*given.world_size > 1 && given.rendezvous.empty()) {
    throw wrong(
        "settings: several ranks need \"rendezvous\": give \"HOST:PORT\", an address of rank 0's "
        "machine that the others reach");
  }
  settings.ranks = {.rank = *given.rank,
                    .world_size = *given.world_size,
                    .source = "the runtime's settings",
                    .rendezvous = given.rendezvous,
                    .rendezvous_source = "setting \"rendezvous\"",
                    .secret = given.secret,
                    .connect_timeout = nanoseconds_of(given.connect_timeout_s),
                    .call_timeout = nanoseconds_of(given.call_timeout_s)};
  return settings;
}

StashSettings stash_settings_of(std::string_view text) {
  using In = SettingsIn<StashSettings>;
  const std::vector<SettingOf<StashSettings>> table{
      In::size("memory", &StashSettings::memory_bytes, 64 * kKiB,
               {.values = "SIZE", .help = "host memory for what is kept"})};
  StashSettings settings;
  apply(text, settings, table, [&](const ConfigSetting& given) {
    if (given.name != "store") return false;
    settings.store = store_of(given);
    return true;
  });
  if (settings.store.empty())
    throw wrong("settings: \"store\" is missing: give a directory, or a list of directories");
  if (settings.memory_bytes == 0)
    throw wrong("settings: \"memory\" is missing: give bytes, or a text such as \"4GiB\"");
  return settings;
}

}  // namespace ziggurat
