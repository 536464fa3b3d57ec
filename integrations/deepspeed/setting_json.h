// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/setting_json.h: a JSON value as the value of one of our settings
// (base/setting.h): 160000000 or "160MB" for a size, [0.9, 0.95] or "0.9,0.95" for two numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/setting.h"

namespace ziggurat {

struct JsonSetting {
  std::optional<SettingValue> typed;  ///< none of a string: parse_setting(text) has it
  std::string text;                   ///< as a flag would say it
};

/// Nothing for a value of the wrong type.
std::optional<JsonSetting> read_setting(const nlohmann::json& value, SettingKind kind);
/// What read_setting() takes for a setting of `kind`, in words: "a whole number".
std::string_view expected_json(SettingKind kind);

}  // namespace ziggurat
