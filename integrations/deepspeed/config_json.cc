// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/config_json.cc: parsing within limits, and the walk over DeepSpeed's
// sections.
#include "integrations/deepspeed/config_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/closest.h"
#include "base/error.h"
#include "integrations/deepspeed/deepspeed_keys.h"

namespace ziggurat {
namespace {

using nlohmann::json;

constexpr int kDepthMax = 4;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

json parse(std::string_view text, const std::string& name) {
  std::vector<std::set<std::string>> open;  // keys of the objects that are open
  const auto callback = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kDepthMax)
      refuse(fmt::format("{} is nested deeper than {} levels", name, kDepthMax));
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      refuse(fmt::format("{} has the key \"{}\" twice", name, parsed.get<std::string>()));
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), callback, /*allow_exceptions=*/true,
                       /*ignore_comments=*/true);
  } catch (const json::parse_error& error) {
    refuse(fmt::format("{} is not JSON: wrong at byte {}", name, error.byte));
  }
}

/// 5e8 is a whole number in DeepSpeed's files.
json as_whole(const json& value) {
  if (!value.is_number_float()) return value;
  const double number = value.get<double>();
  if (number != std::floor(number) || std::abs(number) > 0x1p53) return value;
  return static_cast<std::int64_t>(number);
}

class Translation {
 public:
  explicit Translation(const std::string& name) : name_(name) {}

  ConfigFile read(const json& root) {
    for (const auto& [key, value] : root.items()) {
      if (is_deepspeed_section(key, value.is_object()))
        read_section(key, value);
      else if (const DeepSpeedKey* known = find_deepspeed_key(key))
        read_key(*known, key, value);
      else
        add(key, value, key);
    }
    set_placement();
    set_dtype();
    return std::move(file_);
  }

 private:
  std::string quoted(const std::string& path) const {
    return fmt::format("{}: \"{}\"", name_, path);
  }

  void add(const std::string& key, const json& value, const std::string& path) {
    for (const ConfigSetting& setting : file_.settings) {
      if (setting.key == key)
        refuse(fmt::format("{}: \"{}\" and \"{}\" are one setting: give one of them", name_,
                           setting.path, path));
    }
    file_.settings.push_back({key, value, path});
  }

  void read_section(const std::string& path, const json& section) {
    if (!section.is_object()) refuse(quoted(path) + " must be an object");
    for (const auto& [key, value] : section.items()) {
      const std::string full = path + "." + key;
      if (value.is_object() && is_deepspeed_section(full, true)) {
        read_section(full, value);
        continue;
      }
      const DeepSpeedKey* known = find_deepspeed_key(full);
      if (known == nullptr) unknown(path, key);
      read_key(*known, full, value);
    }
  }

  [[noreturn]] void unknown(const std::string& section, const std::string& key) const {
    const std::string meant = closest(key, deepspeed_keys_in(section));
    refuse(fmt::format("{} is no key of DeepSpeed's that is known here{}",
                       quoted(section + "." + key),
                       meant.empty() ? "" : fmt::format("; did you mean \"{}\"?", meant)));
  }

  void read_key(const DeepSpeedKey& known, const std::string& path, const json& value) {
    using enum DeepSpeedKey::Use;
    if (value.is_null() || value == "auto") return;
    switch (known.use) {
      case kAs: return add(std::string(known.ours), as_whole(value), path);
      case kUnlessOne:
        if (value != 0 && value != 1) add(std::string(known.ours), as_whole(value), path);
        return;
      case kWhereTrue:
        if (!value.is_boolean()) refuse(quoted(path) + " must be true or false");
        if (value.get<bool>()) add(std::string(known.ours), json::parse(known.text), path);
        return;
      case kNoted: file_.notes.push_back(fmt::format("{} {}", quoted(path), known.text)); return;
      case kOnlyAs:
        if (as_whole(value) == json::parse(known.ours)) return;
        refuse(fmt::format("{} is {}: {}", quoted(path), value.dump().substr(0, 60), known.text));
      case kOptimizer: return add("optimizer", optimizer(path, value), path);
      case kDevice: return read_device(path, value);
      case kEnabled:
        if (!value.is_boolean()) refuse(quoted(path) + " must be true or false");
        (value.get<bool>() ? enabled_ : disabled_).push_back(path);
        return;
    }
  }

  json optimizer(const std::string& path, const json& value) const {
    std::string type = value.is_string() ? value.get<std::string>() : value.dump();
    std::ranges::transform(type, type.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    // DeepSpeed's Adam decouples weight decay unless told otherwise (adam_w_mode).
    if (type == "adam") return "adamw";
    if (type == "adamw" || type == "lion" || type == "adagrad" || type == "sgd") return type;
    refuse(fmt::format("{} is {}: there are Adam, AdamW, Lion, Adagrad and SGD", quoted(path),
                       value.dump().substr(0, 60)));
  }

  void read_device(const std::string& path, const json& value) {
    const std::string word = value.is_string() ? value.get<std::string>() : value.dump();
    const bool of_params = path.find("offload_param") != std::string::npos;
    std::string& tier = of_params ? param_tier_ : optimizer_tier_;
    if (word == "none")
      tier = "device";
    else if (word == "cpu")
      tier = "host";
    else if (word == "nvme")
      tier = "nvme";
    else
      refuse(fmt::format("{} is {}: give none, cpu or nvme", quoted(path),
                         value.dump().substr(0, 60)));
    placement_path_ = path;
  }

  /// What is offloaded says where everything is: in DeepSpeed the rest stays on the device.
  void set_placement() {
    if (placement_path_.empty()) return;
    const std::string optimizer = optimizer_tier_.empty() ? "device" : optimizer_tier_;
    add("placement",
        fmt::format("params={},grads={},optimizer={}", param_tier_.empty() ? "device" : param_tier_,
                    optimizer == "device" ? "device" : "host", optimizer),
        placement_path_);
  }

  void set_dtype() {
    if (enabled_.size() > 1) {
      refuse(fmt::format("{}: \"{}\" and \"{}\" are both true: a model has one type", name_,
                         enabled_[0], enabled_[1]));
    }
    if (!enabled_.empty())
      add("dtype", enabled_[0].starts_with("fp16") ? "fp16" : "bf16", enabled_[0]);
    else if (!disabled_.empty())
      add("dtype", "fp32", disabled_[0]);
    if (!enabled_.empty() && enabled_[0].starts_with("fp16")) return;
    // A loss scale is fp16's; DeepSpeed reads it and does nothing with it elsewhere.
    std::erase_if(file_.settings, [&](const ConfigSetting& setting) {
      if (!setting.path.starts_with("fp16.") || setting.key == "dtype") return false;
      file_.notes.push_back(quoted(setting.path) + " is for fp16, which is not enabled");
      return true;
    });
  }

  std::string name_;
  ConfigFile file_;
  std::string param_tier_, optimizer_tier_, placement_path_;
  std::vector<std::string> enabled_, disabled_;  // paths of fp16's and bf16's switches
};

}  // namespace

ConfigFile read_config(std::string_view text, const std::string& name) {
  const json root = parse(text, name);
  if (!root.is_object())
    refuse(fmt::format("{} is not a JSON object, {{\"key\": value, ...}}", name));
  return Translation(name).read(root);
}

}  // namespace ziggurat
