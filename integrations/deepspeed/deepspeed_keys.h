// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/deepspeed_keys.h: tables of what the keys of DeepSpeed 0.19.8's config
// mean to Ziggurat, and of the values that DeepSpeed uses for absent keys. One table is for all
// files; another one has what is different for a training script (ConfigContext::script). Private
// to config_json.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

struct DeepSpeedKey {
  enum class Use : std::uint8_t {
    kAs,         ///< sets `ours` to the same value; `text`, if any, is a note
    kUnlessOne,  ///< sets `ours` to the same value, unless it is 0 or 1
    kWhereTrue,  ///< sets `ours` to the JSON value `text` if it is true
    kNoted,      ///< changes nothing; `text` says why
    kOnlyAs,     ///< may only have the JSON value `ours`, or one of a list, since others would
                 ///< change results; `text` says why
    kRemoved,    ///< DeepSpeed refuses it with any value; `text` says what to do
    // The next four are handed to the script, which honours them. `ours` is DeepSpeed's default
    // (JSON), and `text`, if any, is a note for another value.
    kSwitch,  ///< true or false
    kWhole,   ///< a whole number
    kNumber,
    kText,
    // The next ones are completed together with other keys, by their path.
    kBatch,      ///< one of the three batch sizes
    kOptimizer,  ///< an optimizer's name
    kRate,       ///< the optimizer's rate, which some schedules replace
    kMomentum,   ///< sgd's
    kSchedule,   ///< a schedule's name
    kPeakRate,   ///< the rate after a warm-up, which HF fills with the optimizer's
    kDevice,     ///< the tier of a class of state
    kNvmePath,   ///< the directory of a class of state on NVMe
    kOffload,    ///< an older key for the device "cpu"
    kSumType,    ///< the type in which gradients are exchanged
    kEnabled,    ///< a type's switch
    kParamType,  ///< the model's type again; another one is refused
    kInBf16,     ///< whether a part of the state is in bf16; refused unless all parts agree
  };
  std::string_view path;
  Use use;
  std::string_view ours{};
  std::string_view text{};
};

/// Returns the keys that differ for a training script: those that it honours itself, and those with
/// another meaning.
std::span<const DeepSpeedKey> deepspeed_script_keys();
/// Returns the sections that only a training script has.
std::span<const std::string_view> deepspeed_script_sections();

struct DeepSpeedDefault {
  std::string_view path;
  std::string_view ours;
  std::string_view json;
};
/// Returns the defaults of the keys that a config may lack.
std::span<const DeepSpeedDefault> deepspeed_defaults();
/// Returns the defaults of the keys of an optimizer, which is named by our name.
std::span<const DeepSpeedDefault> deepspeed_optimizer_defaults(std::string_view optimizer);
/// Returns the defaults of the keys of an fp16 model's loss scale.
std::span<const DeepSpeedDefault> deepspeed_loss_scale_defaults();

/// Searches the tables as one, for the command or for a training script.
class DeepSpeedKeys {
 public:
  explicit DeepSpeedKeys(bool script) : script_(script) {}

  /// Finds a key by its path: "zero_optimization.stage". As in DeepSpeed, stage3_x is another name
  /// of x. Returns nullptr for an unknown key.
  const DeepSpeedKey* find(std::string_view path) const;
  /// Returns whether a path is a section, such as "zero_optimization.offload_param". "optimizer" is
  /// one only if it is an object, because a flat file has a setting of this name too.
  bool is_section(std::string_view path, bool is_object) const;
  /// Returns whether DeepSpeed ignores unknown keys in this section.
  static bool is_lenient(std::string_view section);
  /// Returns whether DeepSpeed uses its default for "auto" at this path. Elsewhere DeepSpeed fails
  /// because of "auto".
  static bool drops_auto(std::string_view path);
  /// Returns the keys of a section, without its path.
  std::vector<std::string> in(std::string_view section) const;

 private:
  bool script_;
};

}  // namespace ziggurat
