// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings_file.cc: reads the JSON file of --config with integrations/deepspeed,
// and keeps its values with their types.
//
// The file may be hostile input: its size is limited, and an unknown key or a wrong type is an
// error.
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "collectives/rank_options.h"
#include "core/plan/machines/machine.h"
#include "integrations/cli/settings.h"
#include "integrations/deepspeed/config_json.h"
#include "integrations/deepspeed/setting_json.h"

namespace ziggurat::cli {
namespace {

constexpr std::size_t kFileBytesMax = 1 << 20;

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"),
                                                             &std::fclose);
  if (file == nullptr) throw system_error(errno, fmt::format("cannot open --config {}", path));
  std::string text(kFileBytesMax + 1, '\0');
  const std::size_t size = std::fread(text.data(), 1, text.size(), file.get());
  if (std::ferror(file.get()) != 0)
    throw system_error(errno, fmt::format("cannot read --config {}", path));
  if (size > kFileBytesMax) {
    throw UsageError(
        fmt::format("{} is longer than a settings file may be ({} bytes)", path, kFileBytesMax));
  }
  text.resize(size);
  return text;
}

/// Returns the ranks of the job that is meant: of a planned one those that flags say or the machine
/// has, otherwise those that a launcher started.
int ranks_of_the_job(const Settings& settings) {
  if (settings.has("ranks") && settings.given("ranks"))
    return static_cast<int>(settings.integer("ranks", {.min = 1, .max = 1'000'000}));
  if (settings.has("machine") && settings.given("machine"))
    return find_machine(settings.text("machine")).gpus;
  return rank_options().world_size;
}

}  // namespace

void Settings::apply_file(const std::string& path) { apply_json(read_file(path), path); }

void Settings::apply_json(std::string_view text, const std::string& name) {
  file_ = name;
  try {
    ConfigContext context{.flag = [this](std::string_view setting) { return flag_text(setting); },
                          .fallback =
                              [this](std::string_view setting) {
                                return has(setting) ? value(setting).setting.default_text
                                                    : std::string();
                              },
                          .names = {},
                          .launched_ranks = ranks_of_the_job(*this)};
    for (const auto& [known, entry] : values_) context.names.push_back(known);
    take(read_config(text, name, context));
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void Settings::take(const ConfigFile& file) {
  notes_ = file.notes;
  for (const auto& [key, value, path, assumed] : file.settings) {
    const auto found = values_.find(underscored(key));
    if (found == values_.end() && assumed) continue;
    if (found == values_.end()) {
      std::vector<std::string> keys;
      for (const auto& [known, entry] : values_) keys.push_back(dashed(known));
      const std::string meant = closest(dashed(key), keys);
      if (underscored(path) != key)
        throw UsageError(fmt::format(
            "{}: \"{}\" stands for --{}, which this command does not have; remove the key", file_,
            path, dashed(key)));
      throw UsageError(fmt::format("{}: unknown key \"{}\"{}", file_, path,
                                   meant.empty() ? "; the keys are the flags' names, see --help"
                                                 : fmt::format("; did you mean \"{}\"?", meant)));
    }
    Value& entry = found->second;
    std::optional<JsonSetting> read = read_setting(value, entry.setting.kind);
    if (!read) {
      throw UsageError(fmt::format("{}: \"{}\" is {}; it must be {}", file_, path,
                                   value.dump().substr(0, 60), expected_json(entry.setting.kind)));
    }
    if (entry.source == Source::kFlag) continue;
    entry.typed = std::move(read->typed);
    entry.text = std::move(read->text);
    entry.source = assumed ? Source::kAssumed : Source::kFile;
    entry.path = path;
  }
}

}  // namespace ziggurat::cli
