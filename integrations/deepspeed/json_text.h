// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/json_text.h: JSON as people write it into settings files. Private to
// config_json.cc.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ziggurat {

/// Reads over comments (//, /* */, #) and trailing commas; Infinity and NaN are null. `file` is
/// what messages call the text. Errors: kInvalidArgument for what is no JSON, is nested deeper than
/// any config, or has a key twice.
nlohmann::json parse_json_text(std::string_view text, const std::string& file);

}  // namespace ziggurat
