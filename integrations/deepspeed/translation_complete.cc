// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/translation_complete.cc: completes what several keys decide together, as
// DeepSpeed 0.19.8 does in runtime/config.py (batch sizes) and runtime/engine.py (optimizer and
// schedule).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>

#include "base/error.h"
#include "integrations/deepspeed/translation.h"

namespace ziggurat {
namespace {

using nlohmann::json;

constexpr const char* kTrain = "train_batch_size";
constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
constexpr const char* kAccumulation = "gradient_accumulation_steps";

/// Returns our name of an optimizer; empty for an unknown one. DeepSpeed's Adam decouples weight
/// decay unless the config says otherwise.
std::string optimizer_name(const std::string& type, bool decoupled) {
  struct Name {
    std::string_view theirs, ours;
  };
  static constexpr std::array kNames{Name{"adam", "adam"},
                                     Name{"adamw", "adamw"},
                                     Name{"fusedadam", "adam"},
                                     Name{"deepspeedcpuadam", "adam"},
                                     Name{"lion", "lion"},
                                     Name{"fusedlion", "lion"},
                                     Name{"deepspeedcpulion", "lion"},
                                     Name{"adagrad", "adagrad"},
                                     Name{"sgd", "sgd"},
                                     Name{"deepspeedcpuadagrad", "adagrad"}};
  const auto* found = std::ranges::find(kNames, type, &Name::theirs);
  if (found == kNames.end()) return "";
  return found->ours == "adam" && decoupled ? "adamw" : std::string(found->ours);
}

bool is_type(const std::string& name) { return name == "fp32" || name == "bf16" || name == "fp16"; }

}  // namespace

std::string type_name(std::string text) {
  if (text.starts_with("torch.")) text.erase(0, 6);
  if (text == "float16" || text == "half") return "fp16";
  if (text == "bfloat16") return "bf16";
  return text == "float32" || text == "float" ? "fp32" : text;
}

std::string lowered(const json& value) {
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::int64_t Translation::data_ranks() const {
  const std::int64_t ranks =
      std::max<std::int64_t>(context_.launched_ranks, number_in_force("nproc"));
  return std::max<std::int64_t>(1, ranks / std::max<std::int64_t>(1, number_in_force("tp")));
}

/// Completes the three batch sizes. Two of them give the third, a single one leaves accumulation at
/// 1, and all must agree.
void Translation::set_batches() {
  const std::int64_t ranks = data_ranks();
  const auto read = [&](const char* path, const char* ours) -> std::optional<std::int64_t> {
    const bool by_flag = *ours != '\0' && context_.flag && context_.flag(ours);
    const auto kept = kept_.find(path);
    const ConfigSetting* own = *ours != '\0' ? given(ours) : nullptr;
    if (kept != kept_.end() && own != nullptr)
      refuse(path,
             fmt::format("and \"{}\" are the same setting; give only one of them", own->path));
    if (by_flag || own != nullptr) return number_in_force(ours);
    if (kept == kept_.end()) return std::nullopt;
    if (!kept->second.value.is_number_integer() || kept->second.value.get<std::int64_t>() < 1)
      refuse(path, fmt::format("is {}: give a whole number from 1", kept->second.value.dump()));
    return kept->second.value.get<std::int64_t>();
  };
  const std::optional<std::int64_t> train = read(kTrain, "");
  std::optional<std::int64_t> micro = read(kMicro, "batch");
  std::optional<std::int64_t> accumulation = read(kAccumulation, "accumulate");
  if (!train && !micro) {
    if (!autos_.contains(kTrain) && !autos_.contains(kMicro))
      refuse(kMicro, fmt::format("is missing: DeepSpeed needs either this key or \"{}\"", kTrain));
    micro = number_in_force("batch");
    if (!accumulation && autos_.contains(kAccumulation))
      accumulation = number_in_force("accumulate");
    note(kMicro, fmt::format("is \"auto\": `batch` is {}, `accumulate` {}", *micro,
                             accumulation.value_or(1)));
  }
  if (train && micro && !accumulation) accumulation = *train / *micro / ranks;
  if (train && !micro && accumulation) micro = *train / ranks / *accumulation;
  if (train && !micro) micro = *train / ranks;
  if (!accumulation) accumulation = 1;
  if (train && (*micro < 1 || *accumulation < 1 || *train != *micro * *accumulation * ranks)) {
    refuse(kTrain,
           fmt::format("is {}, but must be micro-batch x accumulation x data-parallel ranks, and "
                       "{} x {} x {} is {}",
                       *train, *micro, *accumulation, ranks, *micro * *accumulation * ranks));
  }
  const auto set = [&](const char* ours, const char* path, std::int64_t value) {
    if (given(ours) != nullptr) return;
    if (kept_.contains(path))
      add(ours, value, path);
    else if (train)
      add(ours, value, kTrain);  // it follows from the batch of a step
    else
      result_.settings.push_back({ours, value, path, /*assumed=*/true});
  };
  set("batch", kMicro, *micro);
  set("accumulate", kAccumulation, *accumulation);
}

/// Translates the optimizer. Without one the trainer's own is used, as in DeepSpeed.
void Translation::set_optimizer() {
  const auto type = kept_.find("optimizer.type");
  if (type == kept_.end()) {
    if (given("optimizer") == nullptr && !autos_.contains("optimizer") && !context_.script)
      note(
          "optimizer",
          "is missing, so the optimizer and its settings come from the flags or from our defaults");
    return leave_out_section("optimizer.params.", "changes nothing: \"optimizer.type\" is missing");
  }
  const auto decoupled = kept_.find("optimizer.params.adam_w_mode");
  const bool is_decoupled = decoupled == kept_.end() || decoupled->second.value != false;
  const std::string name = optimizer_name(lowered(type->second.value), is_decoupled);
  if (name.empty()) {
    refuse("optimizer.type",
           fmt::format("is {}, but only Adam, AdamW, Lion, Adagrad and SGD are supported (and "
                       "DeepSpeed's CPU and fused versions of them)",
                       type->second.value.dump().substr(0, 60)));
  }
  add("optimizer", name, type->second.path);
  if (const auto momentum = kept_.find("optimizer.params.momentum"); momentum != kept_.end()) {
    if (name != "sgd") refuse(momentum->second.path, "is only for SGD; give betas instead");
    add("betas", json::array({momentum->second.value, 0.999}), momentum->second.path);
  }
  add_optimizer_defaults(name);
}

void Translation::add_optimizer_defaults(const std::string& name) {
  // PyTorch's own AdamW has a weight decay of 0.01 unless the config says otherwise.
  const auto torch = kept_.find("optimizer.params.torch_adam");
  if (torch != kept_.end() && torch->second.value == true && name == "adamw")
    assume("weight_decay", 0.01, "optimizer.params.weight_decay");
  for (const auto& preset : deepspeed_optimizer_defaults(name)) {
    if (preset.ours != "lr" || !kept_.contains("optimizer.params.lr"))
      assume(preset.ours, json::parse(preset.json), preset.path);
  }
}

/// Translates the schedule, which takes the optimizer's rate or replaces it.
void Translation::set_schedule() {
  if (!kept_.contains("scheduler.type"))
    leave_out_section("scheduler.params.", "changes nothing: \"scheduler.type\" is missing");
  const auto rate = kept_.find("optimizer.params.lr");
  const auto schedule = kept_.find("scheduler.type");
  const bool optimizer = kept_.contains("optimizer.type");
  std::string name;
  if (schedule != kept_.end()) {
    name = schedule->second.value.is_string() ? schedule->second.value.get<std::string>() : "";
    add("schedule", schedule->second.value, schedule->second.path);
    const bool needs_total = name == "WarmupDecayLR" || name == "WarmupCosineLR";
    if (needs_total && given("total_num_steps") == nullptr && !autos_.contains("total_num_steps"))
      refuse("scheduler.params.total_num_steps", fmt::format("is missing: {} needs it", name));
  } else if (optimizer && given("schedule") == nullptr) {
    // Without a schedule the rate stays the same.
    assume("schedule", "constant", "scheduler.type");
    assume("warmup", 0, "scheduler.type");
  }
  const auto peak = kept_.find("scheduler.params.warmup_max_lr");
  if (peak != kept_.end()) {
    add("warmup_max_lr", peak->second.value, peak->second.path);
  } else if (name == "WarmupDecayLR" && autos_.contains("scheduler.params.warmup_max_lr")) {
    const json value = rate != kept_.end() ? rate->second.value
                                           : json(std::strtod(in_force("lr").c_str(), nullptr));
    assume("warmup_max_lr", value, "scheduler.params.warmup_max_lr");
    note("scheduler.params.warmup_max_lr",
         fmt::format("is \"auto\": `warmup_max_lr` is the optimizer's rate, {}", value.dump()));
  }
  const bool replaced = name == "WarmupDecayLR" || name == "OneCycle" || name == "LRRangeTest" ||
                        (name == "WarmupLR" && peak != kept_.end());
  if (rate == kept_.end()) return;
  if (replaced)
    note(rate->second.path,
         fmt::format("changes nothing: {} has rates of its own, as in DeepSpeed", name));
  else
    add("lr", rate->second.value, rate->second.path);
}

/// Translates the placement. What is not offloaded is on the device, and gradients are where the
/// optimizer is updated.
void Translation::set_placement() {
  const auto tier = [&](const char* section) -> std::string {
    const auto kept = kept_.find(section);
    if (kept == kept_.end() || kept->second.value == "none") return "device";
    return kept->second.value == "cpu" ? "host" : "nvme";
  };
  const std::string optimizer = tier("offload_optimizer");
  const std::string placement =
      fmt::format("params={},grads={},optimizer={}", tier("offload_param"),
                  optimizer == "device" ? "device" : "host", optimizer);
  for (const char* section : {"offload_optimizer", "offload_param"}) {
    const auto kept = kept_.find(section);
    if (kept != kept_.end()) return add("placement", placement, kept->second.path);
  }
  assume("placement", placement, "zero_optimization.offload_param");
}

/// Translates the paths of offloaded state to `store`, because one folder has everything that is on
/// NVMe.
void Translation::set_store() {
  const bool by_flag = context_.flag && context_.flag("store");
  for (const char* section : {"offload_optimizer", "offload_param"}) {
    const auto path = kept_.find(fmt::format("zero_optimization.{}.nvme_path", section));
    if (path == kept_.end()) continue;
    const auto device = kept_.find(section);
    const ConfigSetting* store = given("store");
    if (device == kept_.end() || device->second.value != "nvme")
      note(path->second.path, "changes nothing: no state of this kind is on NVMe");
    else if (by_flag || (store != nullptr && store->value != path->second.value))
      note(path->second.path, "changes nothing: everything on NVMe is in the folder of `store`");
    else if (store == nullptr)
      add("store", path->second.value, path->second.path);
  }
}

/// Leaves out what ZeRO++ cannot do in this run. It needs stage 3 and several ranks, and a
/// secondary partition needs more ranks than it spans.
void Translation::set_exchanges() {
  constexpr std::array kNames{"quantized_weights", "quantized_gradients", "hpz"};
  const auto all = [&](const char* why) {
    for (const char* name : kNames) leave_out(name, why);
  };
  const ConfigSetting* stage = given("zero_stage");
  const bool by_flag = context_.flag && context_.flag("zero_stage");
  if ((stage == nullptr && !by_flag) || number_in_force("zero_stage") != 3) {
    all("changes nothing: it has an effect only in stage 3");
  } else if (data_ranks() == 1) {
    all("changes nothing: there is one rank");
  } else if (given("hpz") != nullptr && number_in_force("hpz") >= data_ranks()) {
    leave_out("hpz", "changes nothing: there are not more ranks than this value");
  }
}

void Translation::set_types() {
  const bool by_flag = context_.flag && context_.flag("dtype");
  if (enabled_.size() > 1) {
    refuse(enabled_[0],
           fmt::format("and \"{}\" are both true, but a model has one type; enable one of them",
                       enabled_[1]));
  }
  const bool fp16 = !enabled_.empty() && enabled_[0].starts_with("fp16");
  const bool scaled =
      fp16 || ((by_flag || autos_.contains("dtype")) && in_force("dtype") == "fp16");
  if (!enabled_.empty())
    add("dtype", fp16 ? "fp16" : "bf16", enabled_[0]);
  else if (!disabled_.empty() && !autos_.contains("dtype"))
    add("dtype", "fp32", disabled_[0]);
  else
    assume("dtype", "fp32", "bf16.enabled");
  check_param_type();
  if (const auto sums = kept_.find("communication_data_type"); sums != kept_.end()) {
    if (given("quantized_gradients") != nullptr)
      note(sums->second.path, "changes nothing: gradients are exchanged in 4 bits");
    else if (const std::string name = lowered(sums->second.value); !is_type(name))
      refuse(sums->second.path, fmt::format("is {}: give fp32, bf16 or fp16", name));
    else
      add("reduce_dtype", lowered(sums->second.value), sums->second.path);
  }
  if (scaled && context_.script) return assume_all(deepspeed_loss_scale_defaults());
  if (scaled) return;
  // Only fp16 has a loss scale; DeepSpeed reads these keys and does nothing with them elsewhere.
  std::erase_if(result_.settings, [&](const ConfigSetting& setting) {
    if (!setting.path.starts_with("fp16.") || setting.name == "dtype") return false;
    note(setting.path, "is for fp16, which is not enabled");
    return true;
  });
}

/// Refuses another type than the one that is enabled, as DeepSpeed does.
void Translation::check_param_type() {
  const auto wanted = kept_.find("data_types.param_dtype");
  if (wanted == kept_.end()) return;
  const ConfigSetting* dtype = given("dtype");
  const std::string model = dtype != nullptr ? dtype->value.get<std::string>() : in_force("dtype");
  if (type_name(lowered(wanted->second.value)) != model) {
    refuse(wanted->second.path,
           fmt::format("is {}, but the model is in {}: enable fp16 or bf16, or leave it out",
                       wanted->second.value.dump(), model));
  }
}

}  // namespace ziggurat
