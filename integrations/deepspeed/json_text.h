// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/json_text.h: reads JSON as people write it into settings files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ziggurat {

/// Parses a text, which messages call `file`. Ignores comments (//, /* */, #) and trailing commas,
/// and makes Infinity and NaN null. Errors: kInvalidArgument for a text that is not JSON, is nested
/// deeper than any config, or has a key twice.
nlohmann::json parse_json_text(std::string_view text, const std::string& file);

}  // namespace ziggurat
