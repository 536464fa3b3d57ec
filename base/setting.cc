// SPDX-License-Identifier: Apache-2.0
// base/setting.cc: converts values to text and back, and words the complaints about wrong values.
#include "base/setting.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <charconv>
#include <cmath>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::array<std::string_view, 2> kTruths{"false", "true"};

bool is_size(SettingKind kind) {
  return kind == SettingKind::kSize || kind == SettingKind::kSizeOrAuto;
}

[[noreturn]] void complain(const std::string& complaint) {
  throw Error(ErrorCode::kInvalidArgument, complaint);
}

std::int64_t parse_integer(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) complain(" is not a whole number");
  return number;
}

double parse_number(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(number))
    complain(" is not a number");
  return number;
}

std::vector<double> parse_numbers(std::string_view text) {
  std::vector<double> numbers;
  for (;;) {
    const std::size_t comma = text.find(',');
    numbers.push_back(parse_number(text.substr(0, comma)));
    if (comma == std::string_view::npos) return numbers;
    text.remove_prefix(comma + 1);
  }
}

std::int64_t parse_bytes(const std::string& text) {
  std::uint64_t size_bytes = 0;
  try {
    size_bytes = parse_size(text, "");
  } catch (const Error&) {
    complain(" is not a size: write it like 160MiB, 1.5GiB or 2GB");
  }
  if (size_bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    complain(" is larger than any memory");
  return static_cast<std::int64_t>(size_bytes);
}

}  // namespace

std::string dashed(std::string_view name) {
  std::string text(name);
  std::ranges::replace(text, '_', '-');
  return text;
}

std::string underscored(std::string_view name) {
  std::string text(name);
  std::ranges::replace(text, '-', '_');
  return text;
}

SettingValue parse_setting(SettingKind kind, const std::string& text) {
  switch (kind) {
    case SettingKind::kText:
    case SettingKind::kGroups: return text;
    case SettingKind::kInteger: return parse_integer(text);
    case SettingKind::kNumber: return parse_number(text);
    case SettingKind::kNumbers: return parse_numbers(text);
    case SettingKind::kSize: return parse_bytes(text);
    case SettingKind::kSizeOrAuto:
      if (text == kAutoSize) return text;
      return parse_bytes(text);
    case SettingKind::kSwitch:
    case SettingKind::kTruth: return require_one_of(text, kTruths) == 1;
  }
  return {};
}

std::string to_text(SettingKind kind, const SettingValue& value) {
  struct Text {
    SettingKind kind;
    std::string operator()(std::monostate) const { return ""; }
    std::string operator()(bool truth) const { return truth ? "true" : "false"; }
    std::string operator()(std::int64_t number) const {
      return is_size(kind) ? exact_bytes(static_cast<std::uint64_t>(number))
                           : fmt::format("{}", number);
    }
    std::string operator()(double number) const { return fmt::format("{}", number); }
    std::string operator()(const std::string& text) const { return text; }
    std::string operator()(const std::vector<double>& numbers) const {
      return fmt::format("{}", fmt::join(numbers, ","));
    }
  };
  return std::visit(Text{kind}, value);
}

std::string to_report(SettingKind kind, const SettingValue& value) {
  const auto* const number = std::get_if<std::int64_t>(&value);
  if (is_size(kind) && number != nullptr) return format_bytes(static_cast<std::uint64_t>(*number));
  const std::string text = to_text(kind, value);
  return text.empty() ? "none" : text;
}

std::int64_t require_in(std::int64_t value, IntegerRange range) {
  if (value >= range.min && value <= range.max) return value;
  if (range.max == IntegerRange{}.max)
    complain(fmt::format(" is too small: give {} or more", range.min));
  complain(fmt::format(" is out of range: give {} to {}", range.min, range.max));
}

double require_in(double value, NumberRange range) {
  if (value >= range.min && value <= range.max) return value;
  if (range.max == NumberRange{}.max)
    complain(fmt::format(" is too small: give {:g} or more", range.min));
  complain(fmt::format(" is out of range: give {:g} to {:g}", range.min, range.max));
}

std::uint64_t require_size(std::int64_t size_bytes, std::uint64_t min_bytes) {
  if (std::cmp_greater_equal(size_bytes, min_bytes)) return static_cast<std::uint64_t>(size_bytes);
  complain(fmt::format(" is too small: give {} or more", format_bytes(min_bytes)));
}

void require_length(const std::vector<double>& values, std::size_t count) {
  if (values.size() == count) return;
  complain(fmt::format(" has {} numbers: give {}, with commas between", values.size(), count));
}

std::size_t require_one_of(const std::string& word, std::span<const std::string_view> words) {
  const auto found = std::ranges::find(words, word);
  if (found == words.end()) complain(fmt::format(" is none of {}", fmt::join(words, ", ")));
  return static_cast<std::size_t>(found - words.begin());
}

double widened(float value) {
  double number = 0;
  const std::string text = fmt::format("{}", value);
  if (std::from_chars(text.data(), text.data() + text.size(), number).ec != std::errc{})
    return value;
  return number;
}

void complain_of_value(const std::exception& error) {
  const std::string_view message = error.what();
  complain(message.starts_with(' ') ? std::string(message) : fmt::format(": {}", message));
}

}  // namespace ziggurat
