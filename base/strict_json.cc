// SPDX-License-Identifier: Apache-2.0
// base/strict_json.cc: a parser's callback that refuses, and checked fields.
#include "base/strict_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "base/error.h"

namespace ziggurat {
namespace {

/// The keys of each object that is open.
class Keys {
 public:
  bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > kJsonDepthMax) throw Error(ErrorCode::kDataLoss, "it is nested too deeply");
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    if (event != Event::key) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    if (!open_.back().insert(key).second)
      throw Error(ErrorCode::kDataLoss, fmt::format("the key '{}' is there twice", key));
    return true;
  }

 private:
  std::vector<std::set<std::string>> open_;
};

}  // namespace

nlohmann::json parse_strict(std::string_view text, const std::string& place) {
  Keys keys;
  try {
    // The parser takes a NUL for the end.
    if (text.find('\0') != std::string_view::npos)
      throw Error(ErrorCode::kDataLoss, "it has a NUL byte");
    return nlohmann::json::parse(
        text.begin(), text.end(),
        [&keys](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
          return keys(depth, event, parsed);
        });
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kDataLoss, fmt::format("{}: {}", place, error.what()));
  }
}

void JsonField::refuse(const std::string& why) const {
  throw Error(ErrorCode::kDataLoss, fmt::format("{}: {}", path_, why));
}

JsonField JsonField::at(const char* key) const {
  if (!value_.is_object()) refuse("it is no object");
  const auto found = value_.find(key);
  if (found == value_.end()) refuse(fmt::format("'{}' is missing", key));
  return {*found, fmt::format("{}.{}", path_, key)};
}

JsonField JsonField::at(std::size_t index) const {
  if (index >= size()) refuse(fmt::format("it has {} values but needs {}", size(), index + 1));
  return {value_[index], fmt::format("{}[{}]", path_, index)};
}

std::size_t JsonField::size() const {
  if (!value_.is_array()) refuse("it is no array");
  return value_.size();
}

void JsonField::require_keys(std::initializer_list<const char*> keys) const {
  for (const char* key : keys) static_cast<void>(at(key));
  for (const auto& [key, value] : value_.items()) {
    if (std::ranges::none_of(keys, [&](const char* known) { return key == known; }))
      refuse(fmt::format("'{}' is not known", key));
  }
}

std::uint64_t JsonField::number(std::uint64_t max) const {
  if (!value_.is_number_unsigned()) refuse("it is no whole number");
  const auto number = value_.get<std::uint64_t>();
  if (number > max) refuse(fmt::format("{} is more than {}", number, max));
  return number;
}

bool JsonField::truth() const {
  if (!value_.is_boolean()) refuse("it is neither true nor false");
  return value_.get<bool>();
}

std::string JsonField::text() const {
  if (!value_.is_string()) refuse("it is no text");
  return value_.get<std::string>();
}

std::uint64_t JsonField::hex() const {
  const std::string digits = text();
  std::uint64_t number = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), number, 16);
  if (digits.size() != 16 || error != std::errc{} || end != digits.data() + digits.size())
    refuse(fmt::format("'{}' is not a hash of 16 digits", digits));
  return number;
}

std::vector<std::int64_t> JsonField::numbers() const {
  std::vector<std::int64_t> numbers;
  numbers.reserve(size());
  for (std::size_t i = 0; i < value_.size(); ++i) {
    const nlohmann::json& its = value_[i];
    const bool is_one = its.is_number_unsigned() && its.get<std::uint64_t>() <= INT64_MAX;
    // A field has its path, which only an error needs: there may be millions of these.
    numbers.push_back(
        static_cast<std::int64_t>(is_one ? its.get<std::uint64_t>() : at(i).number(INT64_MAX)));
  }
  return numbers;
}

}  // namespace ziggurat
