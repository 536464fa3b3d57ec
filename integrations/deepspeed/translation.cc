// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/translation.cc: translates one key at a time.
#include "integrations/deepspeed/translation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/error.h"
#include "base/setting.h"

namespace ziggurat {
namespace {

using nlohmann::json;

std::string short_text(const json& value) { return value.dump().substr(0, 60); }

/// Returns a number without a fraction as a whole number, because DeepSpeed's files may write 5e8.
json as_whole(const json& value) {
  if (!value.is_number_float()) return value;
  const double number = value.get<double>();
  if (number != std::floor(number) || std::abs(number) > 0x1p53) return value;
  return static_cast<std::int64_t>(number);
}

/// Returns whether `value` is the allowed one, or one of an allowed list. {"enabled": false} allows
/// every section that is not enabled.
bool allows(const json& fine, const json& value) {
  if (fine.is_object()) return value.is_object() && value.value("enabled", json(false)) == false;
  if (!fine.is_array()) return value == fine;
  return std::ranges::find(fine, value) != fine.end();
}

}  // namespace

std::string Translation::quoted(std::string_view path) const {
  return fmt::format("{}: \"{}\"", file_, path);
}

void Translation::refuse(const std::string& path, const std::string& what) const {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {}", quoted(path), what));
}

bool Translation::truth(const std::string& path, const json& value) const {
  if (!value.is_boolean()) refuse(path, "must be true or false");
  return value.get<bool>();
}

/// Returns the value that a flag gives, or that the file gives by our name, or our default.
std::string Translation::in_force(std::string_view name) const {
  if (context_.flag) {
    if (const auto text = context_.flag(name)) return *text;
  }
  if (const ConfigSetting* setting = given(name)) return setting->value.dump();
  return context_.fallback ? context_.fallback(name) : "";
}

std::int64_t Translation::number_in_force(std::string_view name) const {
  const std::string text = in_force(name);
  char* end = nullptr;
  const long long number = std::strtoll(text.c_str(), &end, 10);
  return end == text.c_str() ? 1 : number;
}

const ConfigSetting* Translation::given(std::string_view name) const {
  for (const ConfigSetting& setting : result_.settings) {
    if (setting.name == name) return &setting;
  }
  return nullptr;
}

void Translation::add(const std::string& name, const json& value, const std::string& path) {
  if (const ConfigSetting* other = given(name)) {
    refuse(other->path,
           fmt::format("and \"{}\" are the same setting; give only one of them", path));
  }
  result_.settings.push_back({name, value, path});
}

void Translation::note(const std::string& path, std::string_view why) {
  if (!why.empty()) result_.notes.push_back(fmt::format("{} {}", quoted(path), why));
}

void Translation::assume(std::string_view name, const json& value, std::string_view path) {
  if (given(name) != nullptr || autos_.contains(name)) return;
  result_.settings.push_back({std::string(name), value, std::string(path), /*assumed=*/true});
}

void Translation::assume_all(std::span<const DeepSpeedDefault> defaults) {
  for (const auto& [path, ours, text] : defaults) assume(ours, json::parse(text), path);
}

/// Leaves an "auto" to its flag or our default, because it is for the trainer to fill in.
void Translation::leave_to_flag(const DeepSpeedKey& key, const std::string& path) {
  autos_.emplace(path);
  if (key.ours.empty() || !autos_.emplace(key.ours).second) return;
  const bool flag = context_.flag && context_.flag(key.ours);
  const std::string value = in_force(key.ours);
  note(path,
       fmt::format("is \"auto\", so `{}` is {}, {}", key.ours, value.empty() ? "left out" : value,
                   flag ? "as its flag says" : "our default"));
}

/// Handles an "auto" that a script was to fill in before. DeepSpeed drops it in some sections and
/// fails because of it elsewhere.
void Translation::leave_to_default(const DeepSpeedKey& key, const std::string& path) {
  if (key.use == DeepSpeedKey::Use::kNoted) return note(path, key.text);
  if (DeepSpeedKeys::drops_auto(path))
    return note(
        path,
        "is \"auto\" and was not filled in, so it has DeepSpeed's default: give a value, or let "
        "Transformers or Accelerate fill it in");
  refuse(path, "is \"auto\": give a value, or fill it in first, as Transformers and Accelerate do");
}

/// Hands a value to the script, after checking that it has the type of its key.
void Translation::hand(const DeepSpeedKey& key, const std::string& path, const json& value) {
  using enum DeepSpeedKey::Use;
  const json whole = as_whole(value);
  if (key.use == kSwitch && !value.is_boolean()) refuse(path, "must be true or false");
  if (key.use == kWhole && !whole.is_number_integer()) refuse(path, "must be a whole number");
  if (key.use == kNumber && !value.is_number()) refuse(path, "must be a number");
  if (key.use == kText && !value.is_string()) refuse(path, "must be a string");
  result_.handed.push_back({std::string(key.path), whole, path});
  if (whole != json::parse(key.ours)) note(path, key.text);
}

void Translation::take(const DeepSpeedKey& key, const std::string& path, const json& value) {
  using enum DeepSpeedKey::Use;
  if (key.use == kRemoved) refuse(path, fmt::format("cannot be used here: {}", key.text));
  if (value.is_null()) return;
  if (key.use == kOnlyAs && allows(json::parse(key.ours), as_whole(value))) return;
  if (value == "auto") {
    if (context_.script) return leave_to_default(key, path);
    // A batch size and a peak rate follow from other keys if they can.
    if (key.use != kBatch && key.use != kPeakRate) return leave_to_flag(key, path);
    autos_.emplace(path);
    return;
  }
  switch (key.use) {
    case kAs: add(std::string(key.ours), as_whole(value), path); return note(path, key.text);
    case kUnlessOne:
      if (value != 0 && value != 1) add(std::string(key.ours), as_whole(value), path);
      return;
    case kWhereTrue:
      if (truth(path, value)) add(std::string(key.ours), json::parse(key.text), path);
      return;
    case kNoted: kept_[std::string(key.path)] = {value, path}; return note(path, key.text);
    case kOnlyAs: refuse(path, fmt::format("is {}: {}", short_text(value), key.text));
    case kSwitch:
    case kWhole:
    case kNumber:
    case kText: return hand(key, path, value);
    case kEnabled: (truth(path, value) ? enabled_ : disabled_).push_back(path); return;
    case kOffload:
      if (truth(path, value)) take_offload(std::string(key.ours), "cpu", path);
      return;
    case kDevice:
      return take_offload(
          path.find("offload_param") == std::string::npos ? "offload_optimizer" : "offload_param",
          value.is_string() ? value.get<std::string>() : value.dump(), path);
    case kRemoved:
    case kBatch:
    case kOptimizer:
    case kRate:
    case kMomentum:
    case kSchedule:
    case kPeakRate:
    case kNvmePath:
    case kParamType:
    case kInBf16:
    case kSumType: kept_[std::string(key.path)] = {as_whole(value), path}; return;
  }
}

void Translation::leave_out(const std::string& name, std::string_view why) {
  std::erase_if(result_.settings, [&](const ConfigSetting& setting) {
    if (setting.name == name) note(setting.path, why);
    return setting.name == name;
  });
}

/// Leaves out all keys of a section that DeepSpeed does not use, with a note on each.
void Translation::leave_out_section(std::string_view prefix, std::string_view why) {
  std::erase_if(result_.settings, [&](const ConfigSetting& setting) {
    if (!setting.path.starts_with(prefix)) return false;
    note(setting.path, why);
    return true;
  });
  std::erase_if(kept_, [&](const auto& entry) {
    if (!entry.first.starts_with(prefix)) return false;
    note(entry.second.path, why);
    return true;
  });
}

void Translation::take_offload(const std::string& section, const std::string& device,
                               const std::string& path) {
  if (device != "none" && device != "cpu" && device != "nvme")
    refuse(path, fmt::format("is {}: give none, cpu or nvme", short_text(device)));
  if (!kept_.emplace(section, At{device, path}).second) {
    refuse(path, fmt::format("and \"{}\" are the same setting; give only one of them",
                             kept_.find(section)->second.path));
  }
}

void Translation::complete() {
  set_batches();
  set_optimizer();
  set_schedule();
  set_placement();
  set_store();
  set_exchanges();
  set_types();
  assume_all(deepspeed_defaults());
}

}  // namespace ziggurat
