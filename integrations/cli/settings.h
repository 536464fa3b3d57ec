// SPDX-License-Identifier: Apache-2.0
// integrations/cli/settings.h: the values that a command was given by flags and by a JSON file, of
// which the flags win, and how they are written into the command's struct.
//
// A table of settings (base/setting.h) describes each setting once: the flags, their help, the keys
// of the file and the messages come from it. Names have underscores in the table, dashes as flags,
// and either in a file.
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

/// An error in the command line or the settings file, found before the command has done anything.
/// The exit code is 2; that of every other error is 1.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ErrorCode::kInvalidArgument, message) {}
};

/// Returns the settings of a table without the struct that they are written into.
template <class Table>
std::vector<Setting> names_of(const Table& table) {
  return {table.begin(), table.end()};
}

class Settings {
 public:
  /// Takes the settings of `table`. A settings file may also have those of `only_in_file`, although
  /// the command does not use them.
  explicit Settings(std::span<const Setting> table, std::span<const Setting> only_in_file = {});

  /// Reads values from a JSON file with our names or those of DeepSpeed (integrations/deepspeed). A
  /// value that a flag has set stays. Errors: UsageError naming the file, the key and what is
  /// wrong.
  void apply_file(const std::string& path);
  /// Reads values from the text of a JSON file, which messages call `name`.
  void apply_json(std::string_view text, const std::string& name);
  /// Returns notes on keys of the file that change nothing.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  /// Sets the value of a flag. Flags win over the file, whichever comes first.
  void apply_flag(const std::string& name, const std::string& text);

  /// Writes the values that were given into `config`. Errors: UsageError naming the setting and its
  /// value.
  template <class Config, class Table>
  void write_to(Config& config, const Table& table) const {
    for (const SettingOf<Config>& setting : table) {
      if (!has(setting.name) || value(setting.name).source == Source::kDefault) continue;
      read_as(setting.name, [&](const SettingValue& value) { setting.write(config, value); });
    }
  }

  /// Returns whether a flag or the file has set the value. DeepSpeed's default for a key that its
  /// file lacks does not count.
  bool given(std::string_view name) const {
    const Source source = value(name).source;
    return source == Source::kFile || source == Source::kFlag;
  }
  bool has(std::string_view name) const;
  /// Returns how messages name a setting: "--lr 6e-4" or "\"lr\" in run.json: 6e-4".
  std::string described(std::string_view name) const;
  /// Returns where the value came from: "flag", "run.json: optimizer.params.lr", "DeepSpeed's
  /// default of gradient_clipping" or "default".
  std::string origin(std::string_view name) const;

  /// Returns the value's text; empty if there is neither a value nor a default.
  const std::string& text(std::string_view name) const { return value(name).text; }
  // Errors of the next functions: UsageError naming the flag or file, the value and the valid
  // values.
  std::string required(std::string_view name, std::string_view what) const;
  std::int64_t integer(std::string_view name, IntegerRange range) const;
  double number(std::string_view name, NumberRange range) const;
  std::uint64_t size(std::string_view name, std::uint64_t min_bytes) const;
  bool on(std::string_view name) const { return text(name) == "true"; }
  /// Returns the value, which must be one of `words`.
  std::string choice(std::string_view name, std::span<const std::string_view> words) const;

 private:
  /// kAssumed stands for a default of DeepSpeed, whose file was given.
  enum class Source : std::uint8_t { kDefault, kAssumed, kFile, kFlag };
  struct Value {
    Setting setting;
    std::string text;  ///< the value as text, for messages
    Source source = Source::kDefault;
    std::string path{};                   ///< the path of its key, if the file set the value
    std::optional<SettingValue> typed{};  ///< the file's value, if it was not a text
  };
  const Value& value(std::string_view name) const;
  /// Calls `read` with the value. An error of `read` becomes a UsageError that names the setting.
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

/// Calls `read`, a function of another folder, with the text of `name`. An error of `read` becomes
/// a UsageError that names the setting.
template <class Read>
auto read_with(const Settings& settings, std::string_view name, const Read& read) {
  try {
    return read(settings.text(name));
  } catch (const Error& error) {
    throw UsageError(settings.described(name) + ": " + error.what());
  }
}

/// Returns the type of this name. Errors: a complaint about the value (base/setting.h) that lists
/// the types.
DType named_dtype(const std::string& name);

/// Returns the number that a text such as "7B", "350M" or "1.5e9" stands for; none for any other
/// text.
std::optional<double> parse_count(const std::string& text);

}  // namespace ziggurat::cli
