// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_line.h: the line of history that a state belongs to: steps that were made
// one after the other, each from the one before it.
//
// A line begins with a store, and has its uuid for a name; a store that takes that one's place and
// goes on from the line's newest state continues it. Who goes on from any other state leaves the
// line and begins a child of it: what the old line made after that step is another history.
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

/// 32 digits; in messages and names of directories the first 8 do.
inline std::string to_text(const LineId& id) {
  return fmt::format("{:016x}{:016x}", id.high, id.low);
}
inline std::string short_text(const LineId& id) { return to_text(id).substr(0, 8); }
/// Nothing for any other text than to_text()'s.
inline std::optional<LineId> parse_line_id(std::string_view text) {
  LineId id;
  if (text.size() != 32) return std::nullopt;
  std::from_chars(text.data(), text.data() + 16, id.high, 16);
  std::from_chars(text.data() + 16, text.data() + 32, id.low, 16);
  if (to_text(id) != text) return std::nullopt;
  return id;
}

struct StateLine {
  LineId id;                     ///< the uuid of the store with which it began
  std::uint64_t epoch = 0;       ///< how often it had been opened
  std::optional<LineId> parent;  ///< the line that it left; none: it began anew, or it is not known
  std::uint64_t left_at = 0;     ///< the step at which it left its parent
  friend bool operator==(const StateLine&, const StateLine&) = default;
};

}  // namespace ziggurat
