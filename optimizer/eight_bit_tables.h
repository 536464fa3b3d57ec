// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit_tables.h: the 8-bit codes as straight lines. A register evaluates them with
// look-ups among eight values instead of 256.
//
// Within a decade the codes are an even division, so value and rank (the place among the magnitudes
// from zero up) are straight lines of each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "optimizer/eight_bit_codes.h"

namespace ziggurat::internal {

/// Eight values; the rest fills a register of 16 lanes.
using EightValues = std::array<float, 16>;

struct EightBitTables {
  alignas(64) std::array<float, 256> values;  ///< ascending
  /// The same values byte by byte: the lowest bytes first, then the next.
  alignas(64) std::array<std::array<std::uint8_t, 256>, 4> planes;

  /// From rank to value: value = offset + slope * rank. Ranks are counted so that each decade
  /// begins at a power of two (signed: the rank itself, unsigned: rank + 1). So a decade's ranks
  /// share an exponent, whose lower three bits select the line. The published values were rounded,
  /// so they lie off the line by -8 to 7 units of the last place: the nudges, four bits each, eight
  /// in a word.
  alignas(64) EightValues value_offset;
  alignas(64) EightValues value_slope;
  alignas(64) std::array<std::uint32_t, 32> nudges;

  /// From value to rank: rank = nearest(min(offset + slope * value, limit)), except closer than
  /// kRankMargin to half-way. Sections are the decades, and section 7 is the rank of 1. Section s
  /// lies above section_end[s - 1] and reaches to section_end[s].
  alignas(64) EightValues section_end;
  alignas(64) EightValues rank_offset;
  alignas(64) EightValues rank_slope;
  alignas(64) EightValues rank_limit;
  /// The thresholds between each magnitude and the next: the largest float that is nearer to the
  /// lower one or equally near.
  std::vector<float> thresholds;

  explicit EightBitTables(EightBitCode code);
};

/// How near to half-way between two ranks a value may lie on the other side than its line says,
/// because the lines and the published values are rounded (by 2^-15 of a rank at most, which is
/// checked when the tables are made).
inline constexpr float kRankMargin = 0x1.8p-15f;

/// The section of a value, or the previous one: subtract kSectionFirst from the upper half of its
/// bits, saturated, multiply by kSectionFactor, and shift right by 16. A decade has 425 upper
/// halves; the steps are at 5e-6, 5e-5, .., 0.5.
inline constexpr std::uint32_t kSectionFirst = 13566;
inline constexpr std::uint32_t kSectionFactor = 154;

/// The end of the last line, where the rank of 1 is put; unsigned ranks are counted from 1.
inline constexpr float kTopPlace = 255.5f;

const EightBitTables& eight_bit_tables(EightBitCode code) noexcept;

}  // namespace ziggurat::internal
