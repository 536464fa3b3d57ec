// SPDX-License-Identifier: Apache-2.0
// base/strict_json.h: reads JSON from files that may be damaged or hostile: no key twice, no deep
// nesting, nothing after the end, and every field of the type that is asked for.
//
// Private to this source tree, because it includes nlohmann's header.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

inline constexpr int kJsonDepthMax = 16;

/// Parses `text`. Errors: kDataLoss, naming `place` and what is wrong.
nlohmann::json parse_strict(std::string_view text, const std::string& place);

/// A value with the path that leads to it, for messages.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string path)
      : value_(value), path_(std::move(path)) {}

  /// Returns a member of an object. Errors of all functions: kDataLoss, with the path.
  JsonField at(const char* key) const;
  JsonField at(std::size_t index) const;
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  bool is_null() const noexcept { return value_.is_null(); }
  std::size_t size() const;  ///< of an array
  /// Checks that the value is an object with these keys and no others.
  void require_keys(std::initializer_list<const char*> keys) const;
  std::uint64_t number(std::uint64_t max = UINT64_MAX) const;
  bool truth() const;
  std::string text() const;
  std::uint64_t hex() const;  ///< 16 digits
  std::vector<std::int64_t> numbers() const;
  const nlohmann::json& value() const noexcept { return value_; }
  const std::string& path() const noexcept { return path_; }
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  const nlohmann::json& value_;
  std::string path_;
};

}  // namespace ziggurat
