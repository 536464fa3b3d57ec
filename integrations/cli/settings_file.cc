// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings_file.cc: the JSON file of --config: what core/engine/config_json.h
// reads, as the texts that flags would have.
//
// Read as input that may be hostile: a limit on size, no unknown key, the right type or an error.
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/engine/config_json.h"
#include "integrations/cli/settings.h"

namespace ziggurat::cli {
namespace {

using nlohmann::json;

constexpr std::size_t kFileBytesMax = 1 << 20;

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"),
                                                             &std::fclose);
  if (file == nullptr) throw system_error(errno, fmt::format("cannot open --config {}", path));
  std::string text(kFileBytesMax + 1, '\0');
  const std::size_t size = std::fread(text.data(), 1, text.size(), file.get());
  if (std::ferror(file.get()) != 0)
    throw system_error(errno, fmt::format("cannot read --config {}", path));
  if (size > kFileBytesMax) {
    throw UsageError(
        fmt::format("{} is longer than a settings file may be ({} bytes)", path, kFileBytesMax));
  }
  text.resize(size);
  return text;
}

std::string_view expected(SettingKind kind) {
  switch (kind) {
    case SettingKind::kText: return "a string";
    case SettingKind::kInteger: return "a whole number";
    case SettingKind::kNumber: return "a number";
    case SettingKind::kNumbers: return "a list of numbers, or a string like \"0.9,0.95\"";
    case SettingKind::kSize: return "a size: a string like \"160MiB\", or a number of bytes";
    case SettingKind::kSwitch:
    case SettingKind::kTruth: return "true or false";
    case SettingKind::kGroups:
      return "a list of groups like {\"params\": \"h.*\", \"lr-scale\": 0.5}, or a string";
  }
  return "?";
}

/// [{"params": "h.*", "eps": 1e-6}] as "h.*:eps=1e-06"; nothing for anything else.
std::optional<std::string> groups_as_text(const json& groups) {
  if (groups.is_string()) return groups.get<std::string>();
  if (!groups.is_array()) return std::nullopt;
  std::string text;
  for (const json& group : groups) {
    if (!group.is_object() || !group.contains("params") || !group["params"].is_string())
      return std::nullopt;
    std::string entries;
    for (const auto& [key, value] : group.items()) {
      if (key == "params") continue;
      if (!value.is_number() && !value.is_boolean()) return std::nullopt;
      entries += (entries.empty() ? "" : ",") + key + "=" + value.dump();
    }
    text += (text.empty() ? "" : ";") + group["params"].get<std::string>() + ":" + entries;
  }
  return text;
}

/// The text a flag would have had; nothing for a value of the wrong type.
std::optional<std::string> as_text(const json& value, SettingKind kind) {
  switch (kind) {
    case SettingKind::kText:
      if (value.is_string()) return value.get<std::string>();
      break;
    case SettingKind::kInteger:
      if (value.is_number_integer()) return value.dump();
      break;
    case SettingKind::kNumber:
      if (value.is_number()) return value.dump();
      break;
    case SettingKind::kNumbers: {
      if (value.is_string()) return value.get<std::string>();
      if (!value.is_array()) break;
      std::string text;
      for (const json& element : value) {
        if (!element.is_number()) return std::nullopt;
        text += (text.empty() ? "" : ",") + element.dump();
      }
      return text;
    }
    case SettingKind::kSize:
      if (value.is_string()) return value.get<std::string>();
      if (value.is_number_unsigned()) return value.dump();
      break;
    case SettingKind::kSwitch:
    case SettingKind::kTruth:
      if (value.is_boolean()) return value.dump();
      break;
    case SettingKind::kGroups: return groups_as_text(value);
  }
  return std::nullopt;
}

}  // namespace

void Settings::apply_file(const std::string& path) { apply_json(read_file(path), path); }

void Settings::apply_json(std::string_view text, const std::string& name) {
  ConfigFile file;
  try {
    file = read_config(text, name);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  file_ = name;
  notes_ = std::move(file.notes);
  for (const auto& [key, value, path] : file.settings) {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      std::vector<std::string> keys;
      for (const auto& [known, unused] : values_) keys.push_back(known);
      const std::string meant = closest(key, keys);
      if (path != key)
        throw UsageError(
            fmt::format("{}: \"{}\" is --{}, which this command does not have", name, path, key));
      throw UsageError(fmt::format("{}: unknown key \"{}\"{}", name, key,
                                   meant.empty() ? "; the keys are the flags' names, see --help"
                                                 : fmt::format("; did you mean \"{}\"?", meant)));
    }
    Value& entry = found->second;
    std::optional<std::string> converted = as_text(value, entry.setting->kind);
    if (!converted) {
      throw UsageError(fmt::format("{}: \"{}\" is {}; it must be {}", name, path,
                                   value.dump().substr(0, 60), expected(entry.setting->kind)));
    }
    if (entry.source == Source::kFlag) continue;
    entry.text = std::move(*converted);
    entry.source = Source::kFile;
    entry.path = path;
  }
}

}  // namespace ziggurat::cli
