// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_layout.cc: lays out units of whole parameters, and cuts messages.
#include "core/engine/lent/whole_layout.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

/// Whole parameters begin at multiples of a cache line, as those of a trainer's own memory do.
constexpr std::uint64_t kLineBytes = 64;
/// A slice of at least this size is sent alone, straight from where it lies to where it goes.
/// Smaller ones are copied into one message, which costs less than several.
constexpr std::uint64_t kAloneBytes = 64 * kKiB;

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }

[[noreturn]] void refuse_gap(const WholeParam& its) {
  refuse(fmt::format(
      "whole parameter '{}' is in unit {}, but there are fewer parameters: number units "
      "from 0, without gaps",
      its.name, its.unit));
}

}  // namespace

WholeLayout::WholeLayout(const std::vector<WholeParam>& wholes) : wholes_(wholes) {
  for (std::size_t w = 0; w < wholes_.size(); ++w) {
    const WholeParam& its = wholes_[w];
    if (its.count == 0) refuse(fmt::format("whole parameter '{}' has no elements", its.name));
    if (its.unit >= wholes_.size()) refuse_gap(its);
    if (its.unit >= units_.size()) units_.resize(its.unit + std::size_t{1});
    Unit& unit = units_[its.unit];
    if (!unit.wholes.empty() && unit.optional != its.optional)
      refuse(
          fmt::format("whole parameter '{}' of unit {} is optional, or another of the unit is, "
                      "but not both",
                      its.name, its.unit));
    unit.wholes.push_back(w);
    unit.optional = its.optional;
    unit.trained = unit.trained || its.trained;
    unit.elements += its.count;
    offsets_.push_back(unit.bytes);
    unit.bytes += round_up(its.count * size_bytes(its.dtype), kLineBytes);
  }
  for (std::size_t u = 0; u < units_.size(); ++u)
    if (units_[u].wholes.empty())
      refuse(fmt::format("no whole parameter is in unit {}: number units from 0, without gaps", u));
}

void WholeLayout::set_slices(const std::vector<std::vector<Slice>>& of_ranks) {
  for (std::size_t w = 0; w < wholes_.size(); ++w) {
    std::uint64_t next = 0;
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const Slice& its = of_ranks[rank][w];
      if (its.count > 0 && its.first != next)
        refuse(
            fmt::format("whole parameter '{}' of {} elements: rank {} has those from {} on, but "
                        "the ranks before it end at {}",
                        wholes_[w].name, wholes_[w].count, rank, its.first, next));
      next += its.count;
    }
    if (next != wholes_[w].count)
      refuse(fmt::format("whole parameter '{}' has {} elements, but all ranks' slices {}",
                         wholes_[w].name, wholes_[w].count, next));
  }
  slices_ = of_ranks;
}

std::vector<WholeLayout::Message> WholeLayout::messages_of(std::size_t rank,
                                                           std::size_t unit) const {
  Message small;
  std::vector<Message> alone;
  for (const std::size_t w : units_[unit].wholes) {
    const std::uint64_t bytes = range_of(rank, w).bytes;
    if (bytes == 0) continue;
    if (bytes >= kAloneBytes) {
      alone.push_back({.wholes = {w}, .bytes = bytes});
    } else {
      small.wholes.push_back(w);
      small.bytes += bytes;
    }
  }
  if (small.bytes > 0) alone.insert(alone.begin(), std::move(small));
  return alone;
}

WholeLayout::Range WholeLayout::range_of(std::size_t rank, std::size_t whole) const {
  const Slice& its = slices_[rank][whole];
  const std::size_t element_bytes = size_bytes(wholes_[whole].dtype);
  return {.begin = offsets_[whole] + its.first * element_bytes, .bytes = its.count * element_bytes};
}

}  // namespace ziggurat
