// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/translation.h: DeepSpeed's keys as our settings, each taken as it comes
// and completed when all are known. Private to config_json.cc.
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

/// A string without its quotes, else the value's JSON; in small letters.
std::string lowered(const nlohmann::json& value);
/// Ours for DeepSpeed's other words for types: "torch.float16", "half".
std::string type_name(std::string text);

class Translation {
 public:
  Translation(const std::string& file, const ConfigContext& context)
      : file_(file), context_(context) {}

  /// A setting of ours. Errors: kInvalidArgument if it was given already.
  void add(const std::string& name, const nlohmann::json& value, const std::string& path);
  /// A key that changes nothing.
  void note(const std::string& path, std::string_view why);
  /// A key of DeepSpeed's. Errors: kInvalidArgument, naming it.
  void take(const DeepSpeedKey& key, const std::string& path, const nlohmann::json& value);
  /// After the last key: what several decide together, and DeepSpeed's defaults.
  void complete();
  /// The same where a script of its own trains.
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
  void note_whole_params();
  void set_state_format();
  void check_loss_scale();
  void check_tag_validation();
  void check_autocast();
  void hand_defaults();

  const std::string& file_;
  const ConfigContext& context_;
  ConfigFile result_;
  /// Keys whose meaning depends on others', by path without stage3_ and the like.
  std::map<std::string, At, std::less<>> kept_;
  std::set<std::string, std::less<>> autos_;     ///< names of ours that are "auto", and paths
  std::vector<std::string> enabled_, disabled_;  ///< paths of the types' switches
};

}  // namespace ziggurat
