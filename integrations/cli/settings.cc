// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings.cc: typed reading of settings, and what is said when a value is
// nonsense.
#include "integrations/cli/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat::cli {

Settings::Settings(std::span<const Setting> table) {
  for (const Setting& setting : table)
    values_[setting.key] = {&setting, setting.default_text, Source::kDefault, {}};
}

const Settings::Value& Settings::value(const std::string& key) const {
  const auto found = values_.find(key);
  ZIGGURAT_CHECK(found != values_.end(), "no setting '{}'", key);
  return found->second;
}

void Settings::apply_flag(const std::string& key, const std::string& text) {
  const auto found = values_.find(key);
  ZIGGURAT_CHECK(found != values_.end(), "no setting '{}'", key);
  found->second.text = text;
  found->second.source = Source::kFlag;
}

const std::string& Settings::text(const std::string& key) const { return value(key).text; }

std::string Settings::described(const std::string& key) const {
  const Value& entry = value(key);
  if (entry.source == Source::kFile)
    return fmt::format("\"{}\" in {}: '{}'", entry.path, file_, entry.text);
  return fmt::format("--{} {}", key, entry.text.empty() ? "''" : entry.text);
}

std::string Settings::required(const std::string& key, std::string_view what) const {
  const Value& entry = value(key);
  if (!entry.text.empty()) return entry.text;
  if (entry.source != Source::kDefault)
    throw UsageError(fmt::format("{} is empty: give {}", described(key), what));
  throw UsageError(fmt::format("--{} is missing: give {}", key, what));
}

std::int64_t Settings::integer(const std::string& key, IntegerRange range) const {
  const std::string& text = value(key).text;
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw UsageError(fmt::format("{} is not a whole number", described(key)));
  }
  if (number < range.min || number > range.max) {
    const bool open = range.max == std::numeric_limits<std::int64_t>::max();
    throw UsageError(
        open ? fmt::format("{} is too small: give {} or more", described(key), range.min)
             : fmt::format("{} is out of range: give {} to {}", described(key), range.min,
                           range.max));
  }
  return number;
}

double Settings::parse_number(const std::string& key, const std::string& text,
                              NumberRange range) const {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(number)) {
    throw UsageError(fmt::format("{} is not a number", described(key)));
  }
  if (number < range.min || number > range.max) {
    const bool open = range.max == std::numeric_limits<double>::max();
    throw UsageError(
        open ? fmt::format("{} is too small: give {:g} or more", described(key), range.min)
             : fmt::format("{} is out of range: give {:g} to {:g}", described(key), range.min,
                           range.max));
  }
  return number;
}

double Settings::number(const std::string& key, NumberRange range) const {
  return parse_number(key, value(key).text, range);
}

std::vector<double> Settings::numbers(const std::string& key, std::size_t count,
                                      NumberRange range) const {
  std::vector<double> result;
  std::string_view rest = value(key).text;
  for (;;) {
    const std::size_t comma = rest.find(',');
    result.push_back(parse_number(key, std::string(rest.substr(0, comma)), range));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (result.size() != count) {
    throw UsageError(fmt::format("{} has {} numbers: give {}, with commas between", described(key),
                                 result.size(), count));
  }
  return result;
}

std::uint64_t Settings::size(const std::string& key, std::uint64_t min_bytes) const {
  std::uint64_t bytes = 0;
  try {
    bytes = parse_size(value(key).text, key);
  } catch (const Error&) {
    throw UsageError(
        fmt::format("{} is not a size: write it like 160MiB, 1.5GiB or 2GB", described(key)));
  }
  if (bytes < min_bytes) {
    throw UsageError(
        fmt::format("{} is too small: give {} or more", described(key), format_bytes(min_bytes)));
  }
  return bytes;
}

std::string Settings::choice(const std::string& key,
                             std::span<const std::string_view> words) const {
  const std::string& text = value(key).text;
  if (std::find(words.begin(), words.end(), text) != words.end()) return text;
  throw UsageError(fmt::format("{} is none of {}", described(key), fmt::join(words, ", ")));
}

bool Settings::truth(const std::string& key) const {
  static constexpr std::array<std::string_view, 2> kWords{"true", "false"};
  return choice(key, kWords) == "true";
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
