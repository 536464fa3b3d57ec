// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings.h: the values a command was given: by flags and a JSON file, the flags
// winning; and how they come into the struct that the command is.
//
// A table of settings (base/setting.h) says each of them once: flags, their help, the file's keys
// and the messages come from it. Names have underscores in the table, dashes as flags, and either
// in a file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/closest.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/setting.h"

namespace ziggurat {
struct ConfigFile;
}

namespace ziggurat::cli {

/// What is wrong with the command itself, before the world was asked anything. Exit code 2; every
/// other error is 1.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ErrorCode::kInvalidArgument, message) {}
};

/// The names alone, of a table that knows a struct too.
template <class Table>
std::vector<Setting> names_of(const Table& table) {
  return {table.begin(), table.end()};
}

class Settings {
 public:
  /// `only_in_file`: what a settings file may have beside, though the command does not use it.
  explicit Settings(std::span<const Setting> table, std::span<const Setting> only_in_file = {});

  /// Values from a JSON object, by our names or DeepSpeed's (integrations/deepspeed), for every
  /// key no flag has set. Errors: UsageError naming the file, the key and what is wrong.
  void apply_file(const std::string& path);
  /// The same, of text already read; `name` is what messages call it.
  void apply_json(std::string_view text, const std::string& name);
  /// What the file has that changes nothing.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  /// A flag's value. Flags win over the file whichever comes first.
  void apply_flag(const std::string& name, const std::string& text);

  /// Writes what was given into `config`. Errors: UsageError naming the setting and its value.
  template <class Config, class Table>
  void write_to(Config& config, const Table& table) const {
    for (const SettingOf<Config>& setting : table) {
      if (!has(setting.name) || value(setting.name).source == Source::kDefault) continue;
      read_as(setting.name, [&](const SettingValue& value) { setting.write(config, value); });
    }
  }

  /// A flag or the file has set it; DeepSpeed's default for a key that its file lacks has not.
  bool given(std::string_view name) const {
    const Source source = value(name).source;
    return source == Source::kFile || source == Source::kFlag;
  }
  bool has(std::string_view name) const;
  /// "--lr 6e-4" or "\"lr\" in run.json: 6e-4": how messages name a setting.
  std::string described(std::string_view name) const;
  /// "flag", "run.json: optimizer.params.lr", "DeepSpeed's default of gradient_clipping",
  /// "default".
  std::string origin(std::string_view name) const;

  /// The value's text; "" where there is neither value nor default.
  const std::string& text(std::string_view name) const { return value(name).text; }
  // Errors of the rest: UsageError naming the flag or file, the value and what would do.
  std::string required(std::string_view name, std::string_view what) const;
  std::int64_t integer(std::string_view name, IntegerRange range) const;
  double number(std::string_view name, NumberRange range) const;
  std::uint64_t size(std::string_view name, std::uint64_t min_bytes) const;
  bool on(std::string_view name) const { return text(name) == "true"; }
  /// One of `words`.
  std::string choice(std::string_view name, std::span<const std::string_view> words) const;

 private:
  /// Assumed: the default of another program, whose file this is.
  enum class Source : std::uint8_t { kDefault, kAssumed, kFile, kFlag };
  struct Value {
    Setting setting;
    std::string text;  ///< for messages, and what a flag said
    Source source = Source::kDefault;
    std::string path{};                   ///< in the file, if from there
    std::optional<SettingValue> typed{};  ///< the file's, where it was not a text
  };
  const Value& value(std::string_view name) const;
  /// `read` is given the value; its complaint becomes one about the setting.
  template <class Read>
  auto read_as(std::string_view name, const Read& read) const {
    try {
      const Value& its = value(name);
      return read(its.typed ? *its.typed : parse_setting(its.setting.kind, its.text));
    } catch (const Error& error) {
      throw UsageError(described(name) + error.what());
    }
  }
  void take(const ConfigFile& file);
  std::optional<std::string> flag_text(std::string_view name) const;

  std::map<std::string, Value, std::less<>> values_;
  std::string file_;
  std::vector<std::string> notes_;
};

/// Gives the text of `name` to a reader of another folder; its complaint becomes one about the
/// setting.
template <class Read>
auto read_with(const Settings& settings, std::string_view name, const Read& read) {
  try {
    return read(settings.text(name));
  } catch (const Error& error) {
    throw UsageError(settings.described(name) + ": " + error.what());
  }
}

/// A type by its name. Errors: a complaint about a value (base/setting.h) listing them.
DType named_dtype(const std::string& name);

/// "7B", "350M", "1.5e9"; nothing if it is no such count.
std::optional<double> parse_count(const std::string& text);

}  // namespace ziggurat::cli
