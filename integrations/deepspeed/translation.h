// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/translation.h: translates DeepSpeed's keys to our settings. Each key is
// taken as it comes, and the settings are completed when all keys are known. Private to
// config_json.cc.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "integrations/deepspeed/config_json.h"
#include "integrations/deepspeed/deepspeed_keys.h"

namespace ziggurat {

/// Returns a string without its quotes, or the JSON of any other value, in lower case.
std::string lowered(const nlohmann::json& value);
/// Returns our name of a type that DeepSpeed also calls by other names, such as "torch.float16" or
/// "half".
std::string type_name(std::string text);

class Translation {
 public:
  Translation(const std::string& file, const ConfigContext& context)
      : file_(file), context_(context) {}

  /// Adds a setting of ours. Errors: kInvalidArgument if it was given already.
  void add(const std::string& name, const nlohmann::json& value, const std::string& path);
  /// Adds a note on a key that changes nothing.
  void note(const std::string& path, std::string_view why);
  /// Takes a key of DeepSpeed's. Errors: kInvalidArgument naming the key.
  void take(const DeepSpeedKey& key, const std::string& path, const nlohmann::json& value);
  /// Adds what several keys decide together, and DeepSpeed's defaults. Must be called after the
  /// last key.
  void complete();
  /// Does the work of complete() for a training script.
  void complete_for_script();
  ConfigFile result() { return std::move(result_); }

 private:
  struct At {
    nlohmann::json value;
    std::string path;
  };

  [[noreturn]] void refuse(const std::string& path, const std::string& what) const;
  std::string quoted(std::string_view path) const;
  bool truth(const std::string& path, const nlohmann::json& value) const;
  std::string in_force(std::string_view name) const;
  std::int64_t number_in_force(std::string_view name) const;
  const ConfigSetting* given(std::string_view name) const;
  void assume(std::string_view name, const nlohmann::json& value, std::string_view path);
  void assume_all(std::span<const DeepSpeedDefault> defaults);
  void leave_to_flag(const DeepSpeedKey& key, const std::string& path);
  void leave_to_default(const DeepSpeedKey& key, const std::string& path);
  void hand(const DeepSpeedKey& key, const std::string& path, const nlohmann::json& value);
  void take_offload(const std::string& section, const std::string& device, const std::string& path);

  std::int64_t data_ranks() const;
  void leave_out(const std::string& name, std::string_view why);
  void leave_out_section(std::string_view prefix, std::string_view why);
  void set_batches();
  void set_placement();
  void set_store();
  void set_types();
  void check_param_type();
  void set_exchanges();
  void set_optimizer();
  void set_schedule();
  void add_optimizer_defaults(const std::string& name);
  void check_script_schedule();
  void set_script_placement();
  void note_unused_offload();
  void set_state_format();
  void check_loss_scale();
  void check_tag_validation();
  void check_autocast();
  void hand_defaults();

  const std::string& file_;
  const ConfigContext& context_;
  ConfigFile result_;
  /// Keys whose meaning depends on other keys, by their path without prefixes like stage3_.
  std::map<std::string, At, std::less<>> kept_;
  std::set<std::string, std::less<>> autos_;  ///< our names and paths of settings that are "auto"
  std::vector<std::string> enabled_, disabled_;  ///< paths of the switches of types
};

}  // namespace ziggurat
