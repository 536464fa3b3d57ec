// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/config_json.h: reads a run's settings from JSON: a flat object with our
// names, a config of DeepSpeed's with its names, or both in one file.
//
//   {"steps": 100, "placement": "all=host"}                         our names of settings
//   {"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}  DeepSpeed 0.19.8's names
//
// A file with a key of DeepSpeed's means what it means to DeepSpeed: an absent key has DeepSpeed's
// default, the three batch sizes are completed and checked in DeepSpeed's way, and what DeepSpeed
// refuses is refused. A key that is not supported and would change a result is refused; a key that
// changes nothing is named in a note. "auto" leaves a setting to its flag or our default, and a
// note says so; null has the effect of an absent key.
//
// A training script (ConfigContext::script) has no flags. Some keys are handed to the script, which
// honours them itself. "auto" stands for DeepSpeed's default where DeepSpeed drops it, and is
// refused elsewhere.
//
// Comments (//, /* */ and #) and trailing commas are ignored, as in Hjson. The input may be
// hostile, so its depth is limited and no key may be there twice.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

struct ConfigSetting {
  std::string name;      ///< ours: "zero_stage"
  nlohmann::json value;  ///< the value that a flat object would have
  std::string path;      ///< the path of its key: "zero_optimization.stage"
  bool assumed = false;  ///< DeepSpeed's default, because the file lacks the key
};

struct ConfigFile {
  std::vector<ConfigSetting> settings;  ///< each name once
  /// For a script: the keys that it honours itself, by DeepSpeed's path without stage3_.
  std::vector<ConfigSetting> handed;
  nlohmann::json given;  ///< for a script: the whole file
  /// Notes on keys that change nothing, with the reason.
  std::vector<std::string> notes;
};

/// What the reader must know in addition to the file.
struct ConfigContext {
  /// Returns the text of a setting if a flag gave it. Flags win over the file.
  std::function<std::optional<std::string>(std::string_view name)> flag;
  /// Returns our default for a setting.
  std::function<std::string(std::string_view name)> fallback;
  /// The names of all settings.
  std::vector<std::string> names;
  /// The number of ranks that a launcher has started; 1 if the settings decide it.
  int launched_ranks = 1;
  /// True if a training script with a model of its own reads the file.
  bool script = false;
};

/// Reads the text of a file, which messages call `file`. Keys that are not DeepSpeed's are returned
/// as they are, because the caller knows its own settings. Errors: kInvalidArgument naming the key
/// by its path.
ConfigFile read_config(std::string_view text, const std::string& file,
                       const ConfigContext& context = {});

}  // namespace ziggurat
