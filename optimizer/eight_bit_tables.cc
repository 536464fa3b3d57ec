// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit_tables.cc: computes lines through the codes (eight_bit_codes.h).
#include "optimizer/eight_bit_tables.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "base/check.h"
#include "optimizer/eight_bit_codes.h"

namespace ziggurat::internal {
namespace {

constexpr int kDecades = kEightBitDecades;

std::uint32_t to_bits(float value) { return std::bit_cast<std::uint32_t>(value); }

/// The magnitudes of a decade: ranks [first, first + count).
struct Decade {
  std::size_t first, count;
};
Decade decade_of(EightBitCode code, int decade) {
  const std::size_t count = std::size_t{code == EightBitCode::kSigned ? 1u : 2u} << decade;
  return {code == EightBitCode::kSigned ? count : count - 1, count};
}

void set(EightValues& table, std::size_t index, double value) {
  table[index] = static_cast<float>(value);
}

/// Puts each decade's line through the middle of its codes, so that no code is far off the line.
void fit_values(EightBitCode code, std::span<const float> magnitudes, EightBitTables& tables) {
  const std::size_t added = code == EightBitCode::kSigned ? 0 : 1;
  for (int i = 0; i < kDecades; ++i) {
    const Decade decade = decade_of(code, i);
    const double first = magnitudes[decade.first];
    const double last = magnitudes[decade.first + decade.count - 1];
    const double steps = static_cast<double>(std::max<std::size_t>(1, decade.count - 1));
    const double slope = static_cast<float>((last - first) / steps);
    const double middle = static_cast<double>(2 * (decade.first + added) + decade.count - 1) / 2;
    const std::size_t exponent = std::bit_width(decade.first + added) - 1;
    set(tables.value_slope, (127 + exponent) % 8, slope);
    set(tables.value_offset, (127 + exponent) % 8, (first + last) / 2 - slope * middle);
  }
  // The free place is that of zero (unsigned: 1, with what is added) or that of 1 (signed: 128).
  set(tables.value_offset, code == EightBitCode::kSigned ? 134 % 8 : 127 % 8,
      code == EightBitCode::kSigned ? 1 : 0);
}

/// Returns the value of a line at a rank, as eight_bit_inl.h computes it.
float on_line(EightBitCode code, std::size_t rank, const EightBitTables& tables) {
  const auto whole = static_cast<float>(rank);
  const float place = code == EightBitCode::kSigned ? whole : std::min(whole + 1.0f, kTopPlace);
  const std::size_t line = to_bits(place) >> 23 & 7;
  const float rise = tables.value_slope[line] * place;
  return tables.value_offset[line] + rise;
}

void note_nudges(EightBitCode code, std::span<const float> magnitudes, EightBitTables& tables) {
  for (std::size_t rank = 1; rank < magnitudes.size(); ++rank) {
    const auto wanted = static_cast<std::int32_t>(to_bits(magnitudes[rank]));
    const auto nudge = wanted - static_cast<std::int32_t>(to_bits(on_line(code, rank, tables)));
    ZIGGURAT_CHECK(nudge >= -8 && nudge < 8, "rank {} lies {} off its line", rank, nudge);
    tables.nudges[rank / 8 % tables.nudges.size()] |= (static_cast<std::uint32_t>(nudge) & 15u)
                                                      << rank % 8 * 4;
  }
}

void fit_ranks(EightBitCode code, EightBitTables& tables) {
  double power = 1e-6;
  for (int i = 0; i < kDecades; ++i, power *= 10) {
    const Decade decade = decade_of(code, i);
    const auto section = static_cast<std::size_t>(i);
    const std::size_t last = decade.first + decade.count - 1;
    const double slope = static_cast<double>(decade.count) / (0.9 * power);
    set(tables.rank_slope, section, slope);
    // The lower end of an even division is half-way between two codes.
    set(tables.rank_offset, section, static_cast<double>(decade.first) - 0.5 - slope * 0.1 * power);
    set(tables.rank_limit, section, static_cast<double>(last));
    set(tables.section_end, section, tables.thresholds[last]);
  }
  // The lowest section reaches down to zero, whose place is its own rank. For unsigned codes that
  // is rank 1, because a value above zero never becomes zero.
  const double least = code == EightBitCode::kSigned ? 0 : 1;
  set(tables.rank_offset, 0, least);
  set(tables.rank_slope, 0,
      0.5 / static_cast<double>(tables.thresholds[code == EightBitCode::kSigned ? 0 : 1]));
  const auto top = static_cast<double>(tables.thresholds.size());
  set(tables.rank_offset, kDecades, top);
  set(tables.rank_limit, kDecades, top);
  set(tables.section_end, kDecades, std::numeric_limits<double>::infinity());
}

/// Checks the lines. They rise, also as they are computed, so if both sides of each threshold get
/// the right rank, all values do.
void check_ranks(EightBitCode code, const EightBitTables& tables) {
  for (int i = 0; i < kDecades; ++i) {
    const auto section = static_cast<std::size_t>(i);
    const Decade decade = decade_of(code, i);
    for (std::size_t rank = decade.first; rank + 1 < decade.first + decade.count; ++rank) {
      const float below = tables.thresholds[rank];
      for (const float value : {below, std::bit_cast<float>(to_bits(below) + 1)}) {
        const float rise = tables.rank_slope[section] * value;
        const float off = tables.rank_offset[section] + rise - (static_cast<float>(rank) + 0.5f);
        ZIGGURAT_CHECK(std::fabs(off) < kRankMargin, "rank {} lies {} off its line", rank, off);
      }
    }
  }
}

}  // namespace

EightBitTables::EightBitTables(EightBitCode code)
    : values(eight_bit_codes(code).values),
      planes{},
      value_offset{},
      value_slope{},
      nudges{},
      section_end{},
      rank_offset{},
      rank_slope{},
      rank_limit{},
      thresholds{} {
  const EightBitThresholds all = make_eight_bit_thresholds(code);
  thresholds.assign(all.values.begin(),
                    all.values.begin() + static_cast<std::ptrdiff_t>(all.count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t k = 0; k < planes.size(); ++k)
      planes[k][i] = static_cast<std::uint8_t>(to_bits(values[i]) >> 8 * k);
  }
  const auto zero = static_cast<std::size_t>(std::ranges::find(values, 0.0f) - values.begin());
  const std::span<const float> magnitudes = std::span(values).subspan(zero);
  fit_values(code, magnitudes, *this);
  note_nudges(code, magnitudes, *this);
  fit_ranks(code, *this);
  check_ranks(code, *this);
}

const EightBitTables& eight_bit_tables(EightBitCode code) noexcept {
  static const EightBitTables signed_tables(EightBitCode::kSigned);
  static const EightBitTables unsigned_tables(EightBitCode::kUnsigned);
  return code == EightBitCode::kSigned ? signed_tables : unsigned_tables;
}

}  // namespace ziggurat::internal
