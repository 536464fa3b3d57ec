// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings.h: a command's settings as text: from its defaults, a JSON file and
// flags, the later ones winning.
//
// One table per command says each key once; the flags, their help, the file's keys and the messages
// all come from it.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/closest.h"
#include "base/error.h"

namespace ziggurat::cli {

/// What is wrong with the command itself, before the world was asked anything. Exit code 2; every
/// other error is 1.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ErrorCode::kInvalidArgument, message) {}
};

/// A switch is off unless its flag is there; a truth's flag says true or false.
enum class SettingKind : std::uint8_t {
  kText,
  kInteger,
  kNumber,
  kNumbers,
  kSize,
  kSwitch,
  kTruth,
  kGroups
};

struct Setting {
  std::string key;  ///< "lr": the flag is --lr, the file's key "lr"
  SettingKind kind = SettingKind::kText;
  std::string default_text;  ///< as the help shows it; empty: none
  std::string value_name;    ///< "SIZE", "N": for the help
  std::string help;
};

class Settings {
 public:
  explicit Settings(std::span<const Setting> table);

  /// Values from a JSON object, by our names or DeepSpeed's (core/engine/config_json.h), for every
  /// key no flag has set. Errors: UsageError naming the file, the key and what is wrong.
  void apply_file(const std::string& path);
  /// The same, of text already read; `name` is what messages call it.
  void apply_json(std::string_view text, const std::string& name);
  /// What the file has that changes nothing.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  /// A flag's value. Flags win over the file whichever comes first.
  void apply_flag(const std::string& key, const std::string& value);

  /// A flag or the file has set it.
  bool given(const std::string& key) const { return value(key).source != Source::kDefault; }
  /// The value's text; "" where there is neither value nor default.
  const std::string& text(const std::string& key) const;
  /// Errors of the rest: UsageError naming the flag or file, the value and what would do.
  std::string required(const std::string& key, std::string_view what) const;
  struct IntegerRange {
    std::int64_t min = 0;
    std::int64_t max = std::numeric_limits<std::int64_t>::max();
  };
  std::int64_t integer(const std::string& key, IntegerRange range) const;
  struct NumberRange {
    double min = 0;
    double max = std::numeric_limits<double>::max();
  };
  double number(const std::string& key, NumberRange range) const;
  std::vector<double> numbers(const std::string& key, std::size_t count, NumberRange range) const;
  std::uint64_t size(const std::string& key, std::uint64_t min_bytes) const;
  bool on(const std::string& key) const { return text(key) == "true"; }
  bool truth(const std::string& key) const;
  /// One of `words`.
  std::string choice(const std::string& key, std::span<const std::string_view> words) const;

  /// "--lr 6e-4" or "\"lr\" in run.json: 6e-4": how messages name a setting.
  std::string described(const std::string& key) const;

 private:
  enum class Source : std::uint8_t { kDefault, kFile, kFlag };
  struct Value {
    const Setting* setting;
    std::string text;
    Source source = Source::kDefault;
    std::string path{};  ///< in the file, if from there
  };
  const Value& value(const std::string& key) const;
  double parse_number(const std::string& key, const std::string& text, NumberRange range) const;

  std::map<std::string, Value, std::less<>> values_;
  std::string file_;
  std::vector<std::string> notes_;
};

/// Gives the text of `key` to a reader of another folder; its complaint becomes one about the
/// setting.
template <class Read>
auto read_with(const Settings& settings, const std::string& key, const Read& read) {
  try {
    return read(settings.text(key));
  } catch (const Error& error) {
    throw UsageError(settings.described(key) + ": " + error.what());
  }
}

/// "7B", "350M", "1.5e9"; nothing if it is no such count.
std::optional<double> parse_count(const std::string& text);

}  // namespace ziggurat::cli
