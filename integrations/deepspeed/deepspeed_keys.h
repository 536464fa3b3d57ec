// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/deepspeed_keys.h: which keys of DeepSpeed 0.19.8's config mean what here,
// and what it takes for one that is absent. Tables: one for all, and one of what is different where
// a script of its own trains (ConfigContext::script). Private to config_json.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

struct DeepSpeedKey {
  enum class Use : std::uint8_t {
    kAs,         ///< `ours`, with the same value; with `text`: and a note
    kUnlessOne,  ///< the same, but that 0 and 1 mean none there
    kWhereTrue,  ///< true: `ours` with the value `text` (JSON); false: nothing
    kNoted,      ///< nothing; `text` says why
    kOnlyAs,     ///< the value `ours` (JSON; or one of a list) is fine, another would change
                 ///< results: `text`
    kRemoved,    ///< DeepSpeed refuses it, whatever its value: `text` says what to do
    // Handed to the script's side, which honours it: `ours` is DeepSpeed's default (JSON). With
    // `text`: and a note where it says something else.
    kSwitch,  ///< true or false
    kWhole,   ///< a whole number
    kNumber,
    kText,
    // The rest is worked out together, by its path.
    kBatch,      ///< one of the three batch sizes
    kOptimizer,  ///< an optimizer's name
    kRate,       ///< the optimizer's rate, which some schedules replace
    kMomentum,   ///< sgd's
    kSchedule,   ///< a schedule's name
    kPeakRate,   ///< the rate after a warm-up, which HF calls the optimizer's
    kDevice,     ///< where a class of state is
    kNvmePath,   ///< where that is on NVMe
    kOffload,    ///< older for a device "cpu"
    kSumType,    ///< what gradients travel as
    kEnabled,    ///< a type's switch
    kParamType,  ///< the type again: another is refused
    kInBf16,     ///< what of the state is in bf16: all of it, or none
  };
  std::string_view path;
  Use use;
  std::string_view ours{};
  std::string_view text{};
};

/// Where a script of its own trains: what it honours itself, and what is otherwise there.
std::span<const DeepSpeedKey> deepspeed_script_keys();
/// Its sections beside those of all.
std::span<const std::string_view> deepspeed_script_sections();

struct DeepSpeedDefault {
  std::string_view path;
  std::string_view ours;
  std::string_view json;
};
/// What a config means that says nothing of them.
std::span<const DeepSpeedDefault> deepspeed_defaults();
/// The same for the optimizer that the config has, by our name.
std::span<const DeepSpeedDefault> deepspeed_optimizer_defaults(std::string_view optimizer);
/// The same for an fp16 model's loss scale.
std::span<const DeepSpeedDefault> deepspeed_loss_scale_defaults();

/// The tables as one, for the command or for a script.
class DeepSpeedKeys {
 public:
  explicit DeepSpeedKeys(bool script) : script_(script) {}

  /// By path: "zero_optimization.stage". Every stage3_x is x too, as in DeepSpeed. nullptr:
  /// unknown.
  const DeepSpeedKey* find(std::string_view path) const;
  /// "zero_optimization", "zero_optimization.offload_param", ..; "optimizer" only as an object, for
  /// a flat file has one too.
  bool is_section(std::string_view path, bool is_object) const;
  /// DeepSpeed reads over unknown keys there.
  static bool is_lenient(std::string_view section);
  /// DeepSpeed takes its default for "auto" there; elsewhere it fails of it.
  static bool drops_auto(std::string_view path);
  /// The keys of a section, without it.
  std::vector<std::string> in(std::string_view section) const;

 private:
  bool script_;
};

}  // namespace ziggurat
