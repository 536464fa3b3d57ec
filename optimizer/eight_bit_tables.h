// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit_tables.h: the 8-bit codes as straight lines, which a register follows with
// look-ups among eight values instead of 256.
//
// A decade's codes are even cuts, so value and rank (the place among the magnitudes from zero up)
// are straight lines of each other within a decade.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "optimizer/eight_bit_codes.h"

namespace ziggurat::internal {

/// The first eight count: the rest fills a register of 16 lanes.
using EightValues = std::array<float, 16>;

struct EightBitTables {
  alignas(64) std::array<float, 256> values;  ///< ascending
  /// The same, their lowest bytes first, then the next.
  alignas(64) std::array<std::array<std::uint8_t, 256>, 4> planes;

  /// From rank to value. Ranks, counted from the first of a decade's power of two (signed: 1 has
  /// rank 1, unsigned: rank + 1), have an exponent of their own for each decade; its lower three
  /// bits find the line: value = offset + slope * rank. The published values were rounded on their
  /// way, so they lie off the line by -8 to 7 units of the last place: four bits each, eight in a
  /// word.
  alignas(64) EightValues value_offset;
  alignas(64) EightValues value_slope;
  alignas(64) std::array<std::uint32_t, 32> nudges;

  /// From value to rank. Sections are the decades, and 7 the rank of 1. Section s lies above
  /// section_end[s - 1] and reaches to section_end[s]; there rank = nearest(min(offset + slope *
  /// value, limit)), except closer than kRankMargin to half-way.
  alignas(64) EightValues section_end;
  alignas(64) EightValues rank_offset;
  alignas(64) EightValues rank_slope;
  alignas(64) EightValues rank_limit;
  /// Between each magnitude and the next: the largest float that is nearer to the lower or as near.
  std::vector<float> thresholds;

  explicit EightBitTables(EightBitCode code);
};

/// How near to half-way between two ranks a value may lie on the other side than its line says:
/// the lines and the published values are rounded (by 2^-15 of a rank at most, which is checked
/// when the tables are made).
inline constexpr float kRankMargin = 0x1.8p-15f;

/// Section of a value, or the one before: the upper half of its bits less the first of these,
/// saturated, times the second, shifted right by 16. A decade is 425 upper halves; the steps are at
/// 5e-6, 5e-5, .., 0.5.
inline constexpr std::uint32_t kSectionFirst = 13566;
inline constexpr std::uint32_t kSectionFactor = 154;

/// Unsigned ranks are counted from 1; the last, of 1, is put on the last line's end.
inline constexpr float kTopPlace = 255.5f;

const EightBitTables& eight_bit_tables(EightBitCode code) noexcept;

}  // namespace ziggurat::internal
