// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_line.h: the line of history that a state belongs to: steps that were made
// one after the other, each from the previous one.
//
// A line begins with a store and is named by that store's uuid. A store that takes the first one's
// place and goes on from the line's newest state continues the line. A run that goes on from any
// other state leaves the line and begins a child of it, because what the old line made after that
// step is another history.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat {

struct LineId {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  auto operator<=>(const LineId&) const = default;
};

/// Returns 32 digits; messages and names of directories have only the first 8 of them.
inline std::string to_text(const LineId& id) {
  return fmt::format("{:016x}{:016x}", id.high, id.low);
}
inline std::string short_text(const LineId& id) { return to_text(id).substr(0, 8); }
/// Returns nothing for a text that to_text() cannot have made.
inline std::optional<LineId> parse_line_id(std::string_view text) {
  LineId id;
  if (text.size() != 32) return std::nullopt;
  std::from_chars(text.data(), text.data() + 16, id.high, 16);
  std::from_chars(text.data() + 16, text.data() + 32, id.low, 16);
  if (to_text(id) != text) return std::nullopt;
  return id;
}

struct StateLine {
  LineId id;                     ///< uuid of the store with which the line began
  std::uint64_t epoch = 0;       ///< how often the line had been opened
  std::optional<LineId> parent;  ///< the line that it left; empty if it left none or that is not
                                 ///< known
  std::uint64_t left_at = 0;     ///< step at which it left its parent
  friend bool operator==(const StateLine&, const StateLine&) = default;
};

}  // namespace ziggurat
