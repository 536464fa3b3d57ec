// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/setting_json.h: reads a JSON value as the value of one of our settings
// (base/setting.h): 160000000 or "160MB" for a size, [0.9, 0.95] or "0.9,0.95" for two numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/setting.h"

namespace ziggurat {

struct JsonSetting {
  std::optional<SettingValue> typed;  ///< none for a string, which parse_setting(text) reads
  std::string text;                   ///< the text that a flag would have
};

/// Reads the value of a setting of `kind`; none if the value has the wrong type.
std::optional<JsonSetting> read_setting(const nlohmann::json& value, SettingKind kind);
/// Returns in words what read_setting() takes for a setting of `kind`: "a whole number".
std::string_view expected_json(SettingKind kind);

}  // namespace ziggurat
