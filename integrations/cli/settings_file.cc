// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings_file.cc: the JSON file of --config: what integrations/deepspeed
// reads, as typed values.
//
// Read as input that may be hostile: a limit on size, no unknown key, the right type or an error.
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "collectives/rank_options.h"
#include "integrations/cli/settings.h"
#include "integrations/deepspeed/config_json.h"

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

struct FileValue {
  std::optional<SettingValue> typed;
  std::string text;  ///< of a string: read as a flag's would be
};

std::optional<FileValue> text_value(const json& value) {
  if (!value.is_string()) return std::nullopt;
  return FileValue{{}, value.get<std::string>()};
}

std::optional<FileValue> typed_value(SettingKind kind, SettingValue value) {
  std::string text = to_text(kind, value);
  return FileValue{std::move(value), std::move(text)};
}

/// Nothing for a value of the wrong type.
std::optional<FileValue> as_value(const json& value, SettingKind kind) {
  switch (kind) {
    case SettingKind::kText: return text_value(value);
    case SettingKind::kInteger:
      if (!value.is_number_integer()) return std::nullopt;
      return typed_value(kind, value.get<std::int64_t>());
    case SettingKind::kNumber:
      if (!value.is_number()) return std::nullopt;
      return typed_value(kind, value.get<double>());
    case SettingKind::kNumbers: {
      if (!value.is_array()) return text_value(value);
      std::vector<double> numbers;
      for (const json& element : value) {
        if (!element.is_number()) return std::nullopt;
        numbers.push_back(element.get<double>());
      }
      return typed_value(kind, std::move(numbers));
    }
    case SettingKind::kSize:
      if (!value.is_number_unsigned()) return text_value(value);
      return typed_value(kind, value.get<std::int64_t>());
    case SettingKind::kSwitch:
    case SettingKind::kTruth:
      if (!value.is_boolean()) return std::nullopt;
      return typed_value(kind, value.get<bool>());
    case SettingKind::kGroups: {
      std::optional<std::string> text = groups_as_text(value);
      if (!text) return std::nullopt;
      return FileValue{{}, std::move(*text)};
    }
  }
  return std::nullopt;
}

}  // namespace

void Settings::apply_file(const std::string& path) { apply_json(read_file(path), path); }

void Settings::apply_json(std::string_view text, const std::string& name) {
  file_ = name;
  try {
    ConfigContext context{.flag = [this](std::string_view setting) { return flag_text(setting); },
                          .fallback =
                              [this](std::string_view setting) {
                                return has(setting) ? value(setting).setting.default_text
                                                    : std::string();
                              },
                          .names = {},
                          .launched_ranks = rank_options().world_size};
    for (const auto& [known, entry] : values_) context.names.push_back(known);
    take(read_config(text, name, context));
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void Settings::take(const ConfigFile& file) {
  notes_ = file.notes;
  for (const auto& [key, value, path, assumed] : file.settings) {
    const auto found = values_.find(underscored(key));
    if (found == values_.end() && assumed) continue;
    if (found == values_.end()) {
      std::vector<std::string> keys;
      for (const auto& [known, entry] : values_) keys.push_back(dashed(known));
      const std::string meant = closest(dashed(key), keys);
      if (underscored(path) != key)
        throw UsageError(fmt::format("{}: \"{}\" is --{}, which this command does not have", file_,
                                     path, dashed(key)));
      throw UsageError(fmt::format("{}: unknown key \"{}\"{}", file_, path,
                                   meant.empty() ? "; the keys are the flags' names, see --help"
                                                 : fmt::format("; did you mean \"{}\"?", meant)));
    }
    Value& entry = found->second;
    std::optional<FileValue> read = as_value(value, entry.setting.kind);
    if (!read) {
      throw UsageError(fmt::format("{}: \"{}\" is {}; it must be {}", file_, path,
                                   value.dump().substr(0, 60), expected(entry.setting.kind)));
    }
    if (entry.source == Source::kFlag) continue;
    entry.typed = std::move(read->typed);
    entry.text = std::move(read->text);
    entry.source = assumed ? Source::kAssumed : Source::kFile;
    entry.path = path;
  }
}

}  // namespace ziggurat::cli
