// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/config_json.h: a run's settings from JSON: one flat object by our names,
// DeepSpeed's config by its own, or both in one file.
//
//   {"steps": 100, "placement": "all=host"}                         ours: the settings' names
//   {"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}  DeepSpeed 0.19.8's
//
// A file with a key of DeepSpeed's means what it means to DeepSpeed: a key that is absent has
// DeepSpeed's default, the three batch sizes are completed and judged as it does, and what it
// refuses is refused. What is not built and would change a result is refused; a key that changes
// nothing here is named in a note. "auto" leaves a setting to its flag or our default, and a note
// says so; null is as if the key were absent.
//
// A script of its own that trains (ConfigContext::script) has no flags: it honours some keys
// itself, which are handed to it, its model's parameters stay whole, and "auto" is DeepSpeed's
// default where DeepSpeed drops it, and refused elsewhere.
//
// Comments (//, /* */ and #) and trailing commas are read over, as in Hjson. Input may be hostile:
// limits on depth, no key twice.
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
  nlohmann::json value;  ///< as the flat object would have it
  std::string path;      ///< where it was, or would be: "zero_optimization.stage"
  bool assumed = false;  ///< DeepSpeed's default: the file does not say it
};

struct ConfigFile {
  std::vector<ConfigSetting> settings;  ///< each name once
  /// For a script: every key that it honours itself, by DeepSpeed's path without stage3_.
  std::vector<ConfigSetting> handed;
  nlohmann::json given;  ///< for a script: the whole file
  /// Keys that change nothing here, and why.
  std::vector<std::string> notes;
};

/// What the reader of a file knows besides.
struct ConfigContext {
  /// A setting's text where a flag gave it: flags win over the file.
  std::function<std::optional<std::string>(std::string_view name)> flag;
  /// And where none did: our default.
  std::function<std::string(std::string_view name)> fallback;
  /// The settings there are.
  std::vector<std::string> names;
  /// Ranks of the job that a launcher has started; 1: as the settings say.
  int launched_ranks = 1;
  /// A script of its own trains on as many ranks, with a model of its own.
  bool script = false;
};

/// `file` is what messages call the text. Keys that are not DeepSpeed's are given as they are: the
/// caller knows its own. Errors: kInvalidArgument naming the key by its path.
ConfigFile read_config(std::string_view text, const std::string& file,
                       const ConfigContext& context = {});

}  // namespace ziggurat
