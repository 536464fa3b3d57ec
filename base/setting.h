// SPDX-License-Identifier: Apache-2.0
// base/setting.h: one setting: its name, type, range, default and help, and where a struct holds
// it.
//
// A program lists each setting once, in a table of these. Flags and their help, a settings file's
// keys, the agreement among ranks and the report of what changed at resume are made from the table:
//
//   using In = SettingsIn<EngineConfig>;
//   In::integer("slots", &EngineConfig::slots, {.min = 1, .max = 2},
//               {.values = "1|2", .help = "2: every finished step is durable; ..",
//                .at_resume = AtResume::kFixed})
//
// The default is that of the struct. A complaint about a value is worded to follow the setting's
// name and text: " is out of range: give 1 to 2".
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace ziggurat {

/// A value outside the struct that holds it; monostate means that there is none.
using SettingValue =
    std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<double>>;

/// The value of a kSizeOrAuto that somebody else chooses.
inline constexpr std::string_view kAutoSize = "auto";

/// The type of a setting. A switch is off unless its flag is there; the flag of a truth says true
/// or false. Groups are text, or in a file a list of objects.
enum class SettingKind : std::uint8_t {
  kText,
  kInteger,
  kNumber,
  kNumbers,
  kSize,
  kSwitch,
  kTruth,
  kGroups,
  kSizeOrAuto
};

enum class AtResume : std::uint8_t {
  kReported,  ///< may change, and the run reports the change
  kFixed,     ///< never changes for a store or a run, whose own checks refuse a change
  kSilent     ///< may change without a report, because no result depends on it
};

enum class AmongRanks : std::uint8_t {
  kAlike,  ///< must be equal on all ranks, or they do not start
  kOwn     ///< each rank has its own value
};

struct Setting {
  std::string name;  ///< "zero_stage"; its flag has dashes
  SettingKind kind = SettingKind::kText;
  std::string default_text;  ///< as a flag would give it; empty if there is none
  std::string values;        ///< the help's text for the value: "0|1|2|3", "SIZE"
  std::string help;
  AtResume at_resume = AtResume::kReported;
  AmongRanks among_ranks = AmongRanks::kAlike;
};

/// Returns a setting's name as flags spell it, "zero-stage" for "zero_stage". underscored() does
/// the reverse.
std::string dashed(std::string_view name);
std::string underscored(std::string_view name);

/// Reads a value. Errors: kInvalidArgument, for text that is no value of this kind.
SettingValue parse_setting(SettingKind kind, const std::string& text);
/// Returns the text that parse_setting() reads as the same value: "160MiB", "0.9,0.95"; "" for
/// none.
std::string to_text(SettingKind kind, const SettingValue& value);
/// Formats a value for people: sizes are rounded, and a missing value is "none".
std::string to_report(SettingKind kind, const SettingValue& value);

struct IntegerRange {
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
};
struct NumberRange {
  double min = 0;
  double max = std::numeric_limits<double>::max();
};
/// Returns `value` if it is in `range`. Errors: kInvalidArgument, saying which values are allowed.
std::int64_t require_in(std::int64_t value, IntegerRange range);
double require_in(double value, NumberRange range);
std::uint64_t require_size(std::int64_t size_bytes, std::uint64_t min_bytes);
void require_length(const std::vector<double>& values, std::size_t count);
/// Returns the index of `word` in `words`. Errors: kInvalidArgument, listing the words.
std::size_t require_one_of(const std::string& word, std::span<const std::string_view> words);
/// Returns the double with the shortest decimal text that reads as this float: 0.1F becomes 0.1.
double widened(float value);
/// Rethrows the error of a parser as a complaint about a value.
[[noreturn]] void complain_of_value(const std::exception& error);

/// A setting, with the functions that read and write it in a `Config`.
template <class Config>
struct SettingOf : Setting {
  std::function<SettingValue(const Config&)> read;
  /// Errors: kInvalidArgument, for a value out of range.
  std::function<void(Config&, const SettingValue&)> write;
  /// The text that ranks compare, if it is not the whole value.
  std::function<std::string(const Config&)> agreed_text;

  std::string text(const Config& config) const { return to_text(kind, read(config)); }
  std::string agreed(const Config& config) const {
    return agreed_text ? agreed_text(config) : text(config);
  }
};

/// Makes settings. A `place` is a pointer to a member, or a function that returns a reference into
/// a config, const or not. The member may be optional.
template <class Config>
struct SettingsIn {
  struct About {
    std::string values{};
    std::string help{};
    AtResume at_resume = AtResume::kReported;
    AmongRanks among_ranks = AmongRanks::kAlike;
    std::function<std::string(const Config&)> agreed_text{};
  };
  using Read = std::function<SettingValue(const Config&)>;
  using Write = std::function<void(Config&, const SettingValue&)>;

  static SettingOf<Config> custom(std::string name, SettingKind kind, Read read, Write write,
                                  About about) {
    SettingOf<Config> setting;
    setting.name = std::move(name);
    setting.kind = kind;
    setting.values = std::move(about.values);
    setting.help = std::move(about.help);
    setting.at_resume = about.at_resume;
    setting.among_ranks = about.among_ranks;
    setting.agreed_text = std::move(about.agreed_text);
    setting.read = std::move(read);
    setting.write = std::move(write);
    setting.default_text = setting.text(Config{});
    return setting;
  }

  template <class Place>
  static SettingOf<Config> integer(std::string name, Place place, IntegerRange range, About about) {
    return at<Place>(
        std::move(name), SettingKind::kInteger, place,
        [](const auto& held) {
          constexpr auto kMost =
              static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
          return SettingValue(std::cmp_greater(held, kMost)
                                  ? std::numeric_limits<std::int64_t>::max()
                                  : static_cast<std::int64_t>(held));
        },
        [range](auto& held, const SettingValue& value) {
          held = static_cast<std::decay_t<decltype(held)>>(
              require_in(std::get<std::int64_t>(value), range));
        },
        std::move(about));
  }

  template <class Place>
  static SettingOf<Config> number(std::string name, Place place, NumberRange range, About about) {
    return at<Place>(
        std::move(name), SettingKind::kNumber, place,
        [](const auto& held) {
          if constexpr (std::is_same_v<std::decay_t<decltype(held)>, float>)
            return SettingValue(widened(held));
          else
            return SettingValue(held);
        },
        [range](auto& held, const SettingValue& value) {
          held =
              static_cast<std::decay_t<decltype(held)>>(require_in(std::get<double>(value), range));
        },
        std::move(about));
  }

  template <class Place>
  static SettingOf<Config> size(std::string name, Place place, std::uint64_t min_bytes,
                                About about) {
    return at<Place>(
        std::move(name), SettingKind::kSize, place,
        [](const auto& held) { return SettingValue(static_cast<std::int64_t>(held)); },
        [min_bytes](auto& held, const SettingValue& value) {
          held = require_size(std::get<std::int64_t>(value), min_bytes);
        },
        std::move(about));
  }

  /// Makes a setting of a size that is 0 if somebody else chooses it.
  template <class Place>
  static SettingOf<Config> size_or_auto(std::string name, Place place, std::uint64_t min_bytes,
                                        About about) {
    return at<Place>(
        std::move(name), SettingKind::kSizeOrAuto, place,
        [](const auto& held) {
          if (held == 0) return SettingValue(std::string(kAutoSize));
          return SettingValue(static_cast<std::int64_t>(held));
        },
        [min_bytes](auto& held, const SettingValue& value) {
          const auto* const size_bytes = std::get_if<std::int64_t>(&value);
          held = size_bytes == nullptr ? std::uint64_t{0} : require_size(*size_bytes, min_bytes);
        },
        std::move(about));
  }

  /// Makes a setting of a bool: kSwitch or kTruth.
  template <class Place>
  static SettingOf<Config> truth(std::string name, SettingKind kind, Place place, About about) {
    return at<Place>(
        std::move(name), kind, place, [](const auto& held) { return SettingValue(held); },
        [](auto& held, const SettingValue& value) { held = std::get<bool>(value); },
        std::move(about));
  }

  template <class Place>
  static SettingOf<Config> text(std::string name, Place place, About about) {
    return at<Place>(
        std::move(name), SettingKind::kText, place,
        [](const auto& held) { return SettingValue(held); },
        [](auto& held, const SettingValue& value) { held = std::get<std::string>(value); },
        std::move(about));
  }

  /// Makes a setting of an enumeration whose enumerators are in the order of `words`.
  template <class Place>
  static SettingOf<Config> word(std::string name, Place place,
                                std::span<const std::string_view> words, About about) {
    return at<Place>(
        std::move(name), SettingKind::kText, place,
        [words](const auto& held) {
          return SettingValue(std::string(words[static_cast<std::size_t>(held)]));
        },
        [words](auto& held, const SettingValue& value) {
          held = static_cast<std::decay_t<decltype(held)>>(
              require_one_of(std::get<std::string>(value), words));
        },
        std::move(about));
  }

  /// Makes a setting of any type that has a text. `parse(text)` throws if it cannot read the text;
  /// `format(held)` returns a text that `parse` reads as the same value.
  template <class Place, class Parse, class Format>
  static SettingOf<Config> parsed(std::string name, Place place, Parse parse, Format format,
                                  About about) {
    return at<Place>(
        std::move(name), SettingKind::kText, place,
        [format](const auto& held) { return SettingValue(std::string(format(held))); },
        [parse](auto& held, const SettingValue& value) {
          try {
            held = parse(std::get<std::string>(value));
          } catch (const std::exception& error) {
            complain_of_value(error);
          }
        },
        std::move(about));
  }

 private:
  template <class T>
  struct Held {
    using Type = T;
    static constexpr bool kOptional = false;
  };
  template <class T>
  struct Held<std::optional<T>> {
    using Type = T;
    static constexpr bool kOptional = true;
  };

  template <class Place, class Get, class Set>
  static SettingOf<Config> at(std::string name, SettingKind kind, Place place, Get get, Set set,
                              About about) {
    using Kept = Held<std::decay_t<std::invoke_result_t<Place, Config&>>>;
    const auto read = [place, get](const Config& config) -> SettingValue {
      const auto& held = std::invoke(place, config);
      if constexpr (Kept::kOptional)
        return held ? get(*held) : SettingValue{};
      else
        return get(held);
    };
    const auto write = [place, set](Config& config, const SettingValue& value) {
      typename Kept::Type held{};
      set(held, value);
      std::invoke(place, config) = std::move(held);
    };
    return custom(std::move(name), kind, read, write, std::move(about));
  }
};

/// Returns the settings of a struct that is a member of another one. Their defaults are those of
/// the outer struct.
template <class Table, class Outer, class Inner>
std::vector<SettingOf<Outer>> settings_within(const Table& table, Inner Outer::*part) {
  std::vector<SettingOf<Outer>> all;
  for (const SettingOf<Inner>& inner : table) {
    SettingOf<Outer> setting;
    static_cast<Setting&>(setting) = inner;
    setting.read = [read = inner.read, part](const Outer& outer) { return read(outer.*part); };
    setting.write = [write = inner.write, part](Outer& outer, const SettingValue& value) {
      write(outer.*part, value);
    };
    if (inner.agreed_text) {
      setting.agreed_text = [agreed = inner.agreed_text, part](const Outer& outer) {
        return agreed(outer.*part);
      };
    }
    setting.default_text = setting.text(Outer{});
    all.push_back(std::move(setting));
  }
  return all;
}

}  // namespace ziggurat
