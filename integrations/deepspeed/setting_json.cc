// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/setting_json.cc: reads one JSON value by the kind of its setting.
#include "integrations/deepspeed/setting_json.h"

#include <utility>
#include <vector>

namespace ziggurat {
namespace {

using nlohmann::json;

/// Returns groups like [{"params": "h.*", "eps": 1e-6}] as the text "h.*:eps=1e-06", and a string
/// as it is; none for anything else.
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

std::optional<JsonSetting> text_value(const json& value) {
  if (!value.is_string()) return std::nullopt;
  return JsonSetting{{}, value.get<std::string>()};
}

std::optional<JsonSetting> typed_value(SettingKind kind, SettingValue value) {
  std::string text = to_text(kind, value);
  return JsonSetting{std::move(value), std::move(text)};
}

}  // namespace

std::optional<JsonSetting> read_setting(const json& value, SettingKind kind) {
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
    case SettingKind::kSizeOrAuto:
      if (!value.is_number_unsigned()) return text_value(value);
      return typed_value(kind, value.get<std::int64_t>());
    case SettingKind::kSwitch:
    case SettingKind::kTruth:
      if (!value.is_boolean()) return std::nullopt;
      return typed_value(kind, value.get<bool>());
    case SettingKind::kGroups: {
      std::optional<std::string> text = groups_as_text(value);
      if (!text) return std::nullopt;
      return JsonSetting{{}, std::move(*text)};
    }
  }
  return std::nullopt;
}

std::string_view expected_json(SettingKind kind) {
  switch (kind) {
    case SettingKind::kText: return "a string";
    case SettingKind::kInteger: return "a whole number";
    case SettingKind::kNumber: return "a number";
    case SettingKind::kNumbers: return "a list of numbers, or a string like \"0.9,0.95\"";
    case SettingKind::kSize: return "a size: a string like \"160MiB\", or a number of bytes";
    case SettingKind::kSizeOrAuto:
      return "a size: \"auto\", a string like \"160MiB\", or a number of bytes";
    case SettingKind::kSwitch:
    case SettingKind::kTruth: return "true or false";
    case SettingKind::kGroups:
      return "a list of groups like {\"params\": \"h.*\", \"lr-scale\": 0.5}, or a string";
  }
  return "?";
}

}  // namespace ziggurat
