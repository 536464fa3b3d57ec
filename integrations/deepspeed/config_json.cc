// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/config_json.cc: finds each key of a file by its name. Keys that belong
// together are completed in translation.h.
#include "integrations/deepspeed/config_json.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/closest.h"
#include "base/error.h"
#include "base/setting.h"
#include "integrations/deepspeed/deepspeed_keys.h"
#include "integrations/deepspeed/json_text.h"
#include "integrations/deepspeed/translation.h"

namespace ziggurat {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

/// Walks over a file's sections and passes each key on to the translation.
class Reader {
 public:
  Reader(const std::string& file, const ConfigContext& context)
      : file_(file), context_(context), keys_(context.script), translation_(file, context) {}

  ConfigFile read(const json& root) {
    bool theirs = context_.script;
    for (const auto& [key, value] : root.items()) theirs |= is_deepspeeds(key, value);
    for (const auto& [key, value] : root.items()) {
      if (keys_.is_section(key, value.is_object()))
        read_section(key, value);
      else if (const DeepSpeedKey* known = keys_.find(key))
        translation_.take(*known, key, value);
      else
        read_own(key, value, theirs);
    }
    if (theirs) context_.script ? translation_.complete_for_script() : translation_.complete();
    ConfigFile file = translation_.result();
    if (context_.script) file.given = root;
    return file;
  }

 private:
  /// Returns whether a key at the top is one of DeepSpeed's. "aio" alone does not tell, because a
  /// machine profile has it too.
  bool is_deepspeeds(const std::string& key, const json& value) const {
    if (key == "aio") return false;
    return keys_.is_section(key, value.is_object()) || keys_.find(key) != nullptr;
  }

  /// Takes a key that is ours, or notes a key in a file of DeepSpeed's that DeepSpeed would ignore
  /// too.
  void read_own(const std::string& key, const json& value, bool theirs) {
    std::vector<std::string> names;
    for (const std::string& name : context_.names) names.push_back(dashed(name));
    const bool known = std::ranges::find(names, dashed(key)) != names.end();
    const std::string meant = closest(dashed(key), names);
    if (context_.script && !known && !meant.empty()) {
      refuse(
          fmt::format("{}: neither DeepSpeed nor Ziggurat has the key \"{}\"; did you mean \"{}\"?",
                      file_, key, underscored(meant)));
    }
    if (!theirs || known || !meant.empty()) return translation_.add(underscored(key), value, key);
    translation_.note(key, "changes nothing: neither Ziggurat nor DeepSpeed has this key");
  }

  void read_section(const std::string& path, const json& section) {
    if (path == "zero_optimization" && section.is_boolean())
      return translation_.take(*keys_.find("zero_optimization.stage"), path,
                               section.get<bool>() ? 1 : 0);
    if (section.is_null()) return;
    if (!section.is_object()) refuse(fmt::format("{}: \"{}\" must be an object", file_, path));
    for (const auto& [key, value] : section.items()) {
      const std::string full = path + "." + key;
      if (keys_.is_section(full, true) && !value.is_null())
        read_section(full, value);
      else if (const DeepSpeedKey* known = keys_.find(full))
        translation_.take(*known, full, value);
      else if (!keys_.is_section(full, true))
        unknown(path, key);
    }
  }

  void unknown(const std::string& section, const std::string& key) {
    const std::string meant = closest(key, keys_.in(section));
    const std::string hint = meant.empty() ? "" : fmt::format("; did you mean \"{}\"?", meant);
    const std::string path = section + "." + key;
    if (DeepSpeedKeys::is_lenient(section))
      return translation_.note(
          path, "changes nothing: neither Ziggurat nor DeepSpeed knows this key" + hint);
    refuse(fmt::format("{}: \"{}\" is not a key that DeepSpeed knows{}", file_, path, hint));
  }

  const std::string& file_;
  const ConfigContext& context_;
  DeepSpeedKeys keys_;
  Translation translation_;
};

}  // namespace

ConfigFile read_config(std::string_view text, const std::string& file,
                       const ConfigContext& context) {
  const json root = parse_json_text(text, file);
  if (!root.is_object())
    refuse(fmt::format("{} is not a JSON object, {{\"key\": value, ...}}", file));
  return Reader(file, context).read(root);
}

}  // namespace ziggurat
