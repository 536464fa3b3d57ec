// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/translation_script.cc: completes what several keys decide together for a
// training script: where its state is, and what it must honour as in DeepSpeed.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "integrations/deepspeed/translation.h"

namespace ziggurat {
namespace {

using nlohmann::json;

struct Schedule {
  std::string_view name;
  std::array<std::string_view, 2> needs;  ///< the parameters that have no default
};
constexpr std::array kSchedules{
    Schedule{"LRRangeTest", {}}, Schedule{"OneCycle", {"cycle_min_lr", "cycle_max_lr"}},
    Schedule{"WarmupLR", {}}, Schedule{"WarmupDecayLR", {"total_num_steps"}},
    Schedule{"WarmupCosineLR", {"total_num_steps"}}};

constexpr const char* kOptimizerDevice = "zero_optimization.offload_optimizer.device";

}  // namespace

void Translation::complete_for_script() {
  set_batches();
  set_optimizer();
  if (const auto rate = kept_.find("optimizer.params.lr"); rate != kept_.end())
    add("lr", rate->second.value, rate->second.path);
  check_script_schedule();
  set_script_placement();
  note_unused_offload();
  set_types();
  set_state_format();
  check_loss_scale();
  check_tag_validation();
  check_autocast();
  assume_all(deepspeed_defaults());
  hand_defaults();
}

/// Checks the schedule, which the script makes from the file's own values. Refuses an unknown
/// schedule, and one that lacks a parameter without a default.
void Translation::check_script_schedule() {
  const auto type = kept_.find("scheduler.type");
  if (type == kept_.end())
    return leave_out_section("scheduler.params.", "changes nothing: \"scheduler.type\" is missing");
  const std::string name =
      type->second.value.is_string() ? type->second.value.get<std::string>() : "";
  const auto* found = std::ranges::find(kSchedules, name, &Schedule::name);
  if (found == kSchedules.end()) {
    refuse(type->second.path,
           fmt::format(
               "is {}, but only LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR and WarmupCosineLR "
               "are supported; give another schedule to initialize() as lr_scheduler",
               type->second.value.dump()));
  }
  add("schedule", name, type->second.path);
  for (const std::string_view needed : found->needs) {
    if (!needed.empty() && given(needed) == nullptr)
      refuse(fmt::format("scheduler.params.{}", needed),
             fmt::format("is missing: {} needs it", name));
  }
  if (const auto peak = kept_.find("scheduler.params.warmup_max_lr"); peak != kept_.end())
    add("warmup_max_lr", peak->second.value, peak->second.path);
}

/// Places the state in host memory, or in a directory on NVMe. It is never on the device.
void Translation::set_script_placement() {
  for (const std::string section : {"offload_optimizer", "offload_param"}) {
    const std::string prefix = "zero_optimization." + section;
    const auto device = kept_.find(section);
    const auto path = kept_.find(prefix + ".nvme_path");
    const bool on_nvme = device != kept_.end() && device->second.value == "nvme";
    if (path != kept_.end() && !path->second.value.is_string())
      refuse(path->second.path, "must be a string that names a directory");
    if (path != kept_.end() && !on_nvme)
      note(path->second.path, "changes nothing: no state of this kind is on NVMe");
    const auto handed = [&](const char* key, const auto& found) {
      result_.handed.push_back({prefix + key, found == kept_.end() ? json() : found->second.value,
                                prefix + key, found == kept_.end()});
    };
    handed(".device", device);
    handed(".nvme_path", path);
  }
  const auto device = kept_.find("offload_optimizer");
  if (device == kept_.end() || device->second.value == "none") {
    if (given("placement") == nullptr)
      note(kOptimizerDevice,
           "is neither cpu nor nvme, but optimizer state is in host memory all the same");
    return assume("placement", "host", kOptimizerDevice);
  }
  if (device->second.value == "cpu") return add("placement", "host", device->second.path);
  const auto path = kept_.find("zero_optimization.offload_optimizer.nvme_path");
  if (path == kept_.end() || path->second.value == "")
    refuse("zero_optimization.offload_optimizer.nvme_path",
           "is missing, although the device is nvme; give a directory on NVMe");
  add("placement", "nvme:" + path->second.value.get<std::string>(), device->second.path);
}

/// Notes that parameters are to be offloaded below stage 3, where DeepSpeed does not do it either.
void Translation::note_unused_offload() {
  const ConfigSetting* stage = given("zero_stage");
  const auto device = kept_.find("offload_param");
  if (device == kept_.end() || device->second.value == "none") return;
  if (stage != nullptr && stage->value == 3) return;
  note(device->second.path,
       "changes nothing, here or in DeepSpeed: parameters are offloaded in stage 3 alone");
}

/// Translates bf16 masters and moments. Both together are a format of ours; one without the other
/// is refused.
void Translation::set_state_format() {
  const char* const kMasters = "bf16.bf16_master_weights_and_grads";
  const char* const kMoments = "bf16.bf16_optimizer_states";
  const auto asked = [&](const char* path) {
    const auto kept = kept_.find(path);
    return kept != kept_.end() && truth(path, kept->second.value);
  };
  const bool masters = asked(kMasters);
  const bool moments = asked(kMoments);
  if (masters != moments) {
    refuse(
        masters ? kMasters : kMoments,
        fmt::format(
            "is true, but \"{}\" is not; give both, or give neither and choose with `state_format`",
            masters ? kMoments : kMasters));
  }
  if (!masters) return;
  const ConfigSetting* dtype = given("dtype");
  const ConfigSetting* stage = given("zero_stage");
  if (dtype->value != "bf16" || stage == nullptr || stage->value == 0)
    refuse(kMasters, "is true, but needs \"bf16.enabled\" and a stage from 1, as in DeepSpeed");
  add("state_format", "bf16", kMasters);
  note(kMasters,
       "is true: state is kept in bf16, but gradients are summed and state is updated in fp32");
}

/// Refuses what DeepSpeed's own checks refuse. The checks of a dynamic scale apply only if the
/// scale is dynamic.
void Translation::check_loss_scale() {
  const ConfigSetting* scale = given("loss_scale");
  if (scale == nullptr) return;
  if (!scale->value.is_number() || scale->value < 0)
    refuse(scale->path, fmt::format("is {}: give a number from 0; 0 means a dynamic scale",
                                    scale->value.dump()));
  for (const char* name :
       {"initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}) {
    const ConfigSetting* setting = given(name);
    const bool positive = std::string_view(name).starts_with("loss") || *name == 'm';
    if (!setting->value.is_number_integer() ||
        (scale->value == 0 && positive && setting->value < 1)) {
      refuse(setting->path, fmt::format("is {}: give a whole number{}", setting->value.dump(),
                                        positive ? " from 1" : ""));
    }
  }
  const ConfigSetting* consecutive = given("consecutive_hysteresis");
  static_cast<void>(truth(consecutive->path, consecutive->value));
}

void Translation::check_tag_validation() {
  for (const ConfigSetting& handed : result_.handed) {
    if (handed.name != "checkpoint.tag_validation") continue;
    const std::string word = lowered(handed.value);
    if (word != "warn" && word != "ignore" && word != "fail")
      refuse(handed.path, fmt::format("is {}: give Warn, Ignore or Fail", handed.value.dump()));
  }
}

/// Refuses autocast to any type but bf16: fp16 would need a loss scale of its own, and without a
/// type PyTorch takes fp16 on a GPU.
void Translation::check_autocast() {
  json enabled = false;
  json dtype;
  for (const ConfigSetting& handed : result_.handed) {
    if (handed.name == "torch_autocast.enabled") enabled = handed.value;
    if (handed.name == "torch_autocast.dtype") dtype = handed.value;
  }
  if (enabled == true && type_name(lowered(dtype)) != "bf16") {
    refuse("torch_autocast.dtype",
           fmt::format("is {}: give bfloat16, or enable fp16 instead of autocast", dtype.dump()));
  }
}

/// Hands DeepSpeed's default to the script for each key that the file lacks.
void Translation::hand_defaults() {
  using enum DeepSpeedKey::Use;
  for (const DeepSpeedKey& key : deepspeed_script_keys()) {
    const bool is_handed =
        key.use == kSwitch || key.use == kWhole || key.use == kNumber || key.use == kText;
    const std::string path(key.path);
    if (is_handed &&
        std::ranges::find(result_.handed, path, &ConfigSetting::name) == result_.handed.end())
      result_.handed.push_back({path, json::parse(key.ours), path, /*assumed=*/true});
  }
}

}  // namespace ziggurat
