// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/config_json.h: a run's settings from JSON: one flat object by our names,
// DeepSpeed's config by its own, or both in one file.
//
//   {"steps": 100, "placement": "all=host"}                       ours: the flags' names
//   {"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}  DeepSpeed 0.19.8's
//
// DeepSpeed's keys are translated to ours; what means nothing here is said, not swallowed, and what
// would change a run's result and is not built is refused. "auto" and null leave a setting to its
// default. Comments (// and /* */) are read over. Input may be hostile: limits on depth, no key
// twice.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

struct ConfigSetting {
  std::string key;       ///< ours: "zero-stage"
  nlohmann::json value;  ///< as the flat object would have it
  std::string path;      ///< where it was: "zero_optimization.stage"
};

struct ConfigFile {
  std::vector<ConfigSetting> settings;  ///< each key once
  /// Of keys that change nothing here: which, and why.
  std::vector<std::string> notes;
};

/// `name` is what messages call the text. Keys that are not DeepSpeed's are given as they are: the
/// caller knows its own. Errors: kInvalidArgument naming the key by its path.
ConfigFile read_config(std::string_view text, const std::string& name);

}  // namespace ziggurat
