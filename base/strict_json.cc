// SPDX-License-Identifier: Apache-2.0
// base/strict_json.cc: builds a value while it is parsed, refuses bad JSON, and checks fields.
#include "base/strict_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"

namespace ziggurat {
namespace {

/// Builds the same value as nlohmann's own parser. That parser, if given a callback, looks at all
/// of an object's members whenever one of them ends: 50 million looks for 10,000 tensors.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(nlohmann::json& root) : root_(root) {}

  bool null() override { return add(nullptr) != nullptr; }
  bool boolean(bool value) override { return add(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return add(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return add(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return add(value) != nullptr;
  }
  bool string(string_t& value) override { return add(std::move(value)) != nullptr; }
  bool binary(binary_t& value) override { return add(std::move(value)) != nullptr; }
  bool start_object(std::size_t) override { return open(nlohmann::json::object()); }
  bool start_array(std::size_t) override { return open(nlohmann::json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& key) override {
    require_depth();
    const auto [member, is_new] =
        open_.back()->get_ref<nlohmann::json::object_t&>().emplace(key, nullptr);
    if (!is_new)
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("the key '{}' appears twice in one object", key));
    member_ = &member->second;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& why) override {
    throw Error(ErrorCode::kDataLoss, why.what());
  }

 private:
  void require_depth() const {
    if (open_.size() > kJsonDepthMax)
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format("the JSON is nested too deeply: at most {} levels are read", kJsonDepthMax));
  }
  /// Adds `value` where the parser is now, and returns it.
  nlohmann::json* add(nlohmann::json value) {
    require_depth();
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *member_ = std::move(value);
    return member_;
  }
  bool open(nlohmann::json value) {
    open_.push_back(add(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  nlohmann::json& root_;
  std::vector<nlohmann::json*> open_;  // objects and arrays, the innermost last
  nlohmann::json* member_ = nullptr;   // value of the innermost object's key that was read last
};

}  // namespace

nlohmann::json parse_strict(std::string_view text, const std::string& place) {
  nlohmann::json value;
  Builder builder(value);
  try {
    // The parser takes a NUL byte for the end of the text.
    if (text.find('\0') != std::string_view::npos)
      throw Error(ErrorCode::kDataLoss, "the JSON has a NUL byte");
    static_cast<void>(nlohmann::json::sax_parse(text.begin(), text.end(), &builder));
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kDataLoss, fmt::format("{}: {}", place, error.what()));
  }
  return value;
}

void JsonField::refuse(const std::string& why) const {
  throw Error(ErrorCode::kDataLoss, fmt::format("{}: {}", path_, why));
}

JsonField JsonField::at(const char* key) const {
  if (!value_.is_object()) refuse("the value is not an object");
  const auto found = value_.find(key);
  if (found == value_.end()) refuse(fmt::format("'{}' is missing", key));
  return {*found, fmt::format("{}.{}", path_, key)};
}

JsonField JsonField::at(std::size_t index) const {
  if (index >= size())
    refuse(fmt::format("the array has {} values but needs {}", size(), index + 1));
  return {value_[index], fmt::format("{}[{}]", path_, index)};
}

std::size_t JsonField::size() const {
  if (!value_.is_array()) refuse("the value is not an array");
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
  if (!value_.is_number_unsigned()) refuse("the value is not a whole number");
  const auto number = value_.get<std::uint64_t>();
  if (number > max) refuse(fmt::format("the value {} is more than {}", number, max));
  return number;
}

bool JsonField::truth() const {
  if (!value_.is_boolean()) refuse("the value is neither true nor false");
  return value_.get<bool>();
}

std::string JsonField::text() const {
  if (!value_.is_string()) refuse("the value is not a string");
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
    // Makes a JsonField only for the error, because a field builds its path, and there may be
    // millions of numbers.
    numbers.push_back(
        static_cast<std::int64_t>(is_one ? its.get<std::uint64_t>() : at(i).number(INT64_MAX)));
  }
  return numbers;
}

}  // namespace ziggurat
