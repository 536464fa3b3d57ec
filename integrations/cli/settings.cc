// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings.cc: knows where each setting got its value, and says so in errors about
// the value.
#include "integrations/cli/settings.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace ziggurat::cli {
Settings::Settings(std::span<const Setting> table, std::span<const Setting> only_in_file) {
  const auto add = [this](const Setting& setting) {
    values_.try_emplace(underscored(setting.name),
                        Value{setting, setting.default_text, Source::kDefault, {}, {}});
  };
  for (const Setting& setting : table) add(setting);
  for (const Setting& setting : only_in_file) add(setting);
}

const Settings::Value& Settings::value(std::string_view name) const {
  const auto found = values_.find(underscored(name));
  ZIGGURAT_CHECK(found != values_.end(), "no setting '{}'", name);
  return found->second;
}

bool Settings::has(std::string_view name) const { return values_.contains(underscored(name)); }

std::optional<std::string> Settings::flag_text(std::string_view name) const {
  const auto found = values_.find(underscored(name));
  if (found == values_.end() || found->second.source != Source::kFlag) return std::nullopt;
  return found->second.text;
}

void Settings::apply_flag(const std::string& name, const std::string& text) {
  const auto found = values_.find(underscored(name));
  ZIGGURAT_CHECK(found != values_.end(), "no setting '{}'", name);
  found->second.text = text;
  found->second.source = Source::kFlag;
  found->second.typed.reset();
}

std::string Settings::described(std::string_view name) const {
  const Value& entry = value(name);
  if (entry.source == Source::kAssumed)
    return fmt::format("DeepSpeed's default of \"{}\" in {}, '{}'", entry.path, file_, entry.text);
  if (entry.source == Source::kFile)
    return fmt::format("\"{}\" in {}: '{}'", entry.path, file_, entry.text);
  return fmt::format("--{} {}", dashed(name), entry.text.empty() ? "''" : entry.text);
}

std::string Settings::origin(std::string_view name) const {
  const Value& entry = value(name);
  switch (entry.source) {
    case Source::kDefault: return "default";
    case Source::kAssumed: return "DeepSpeed's default of " + entry.path;
    case Source::kFlag: return "flag";
    case Source::kFile: return fmt::format("{}: {}", file_, entry.path);
  }
  return "?";
}

std::string Settings::required(std::string_view name, std::string_view what) const {
  const Value& entry = value(name);
  if (!entry.text.empty()) return entry.text;
  if (entry.source != Source::kDefault)
    throw UsageError(fmt::format("{} is empty: give {}", described(name), what));
  throw UsageError(fmt::format("--{} is missing: give {}", dashed(name), what));
}

std::int64_t Settings::integer(std::string_view name, IntegerRange range) const {
  return read_as(name, [&](const SettingValue& value) {
    return require_in(std::get<std::int64_t>(value), range);
  });
}

double Settings::number(std::string_view name, NumberRange range) const {
  return read_as(
      name, [&](const SettingValue& value) { return require_in(std::get<double>(value), range); });
}

std::uint64_t Settings::size(std::string_view name, std::uint64_t min_bytes) const {
  return read_as(name, [&](const SettingValue& value) {
    return require_size(std::get<std::int64_t>(value), min_bytes);
  });
}

std::string Settings::choice(std::string_view name, std::span<const std::string_view> words) const {
  return read_as(name, [&](const SettingValue& value) {
    return std::string(words[require_one_of(std::get<std::string>(value), words)]);
  });
}

DType named_dtype(const std::string& name) {
  require_one_of(name, kDTypeNames);
  return *parse_dtype(name);
}

std::optional<double> parse_count(const std::string& text) {
  std::size_t used = 0;
  double value = 0;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  const std::string unit = text.substr(used);
  if (unit == "K" || unit == "k")
    value *= 1e3;
  else if (unit == "M" || unit == "m")
    value *= 1e6;
  else if (unit == "B" || unit == "b" || unit == "G")
    value *= 1e9;
  else if (unit == "T" || unit == "t")
    value *= 1e12;
  else if (!unit.empty())
    return std::nullopt;
  return value;
}

}  // namespace ziggurat::cli
