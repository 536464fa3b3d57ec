// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_layout.cc: lays out units of whole parameters, and cuts messages.
#include "core/engine/lent/whole_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "collectives/quantize/quantized_block.h"
#include "core/engine/lent/slice_codes.h"

namespace ziggurat {
namespace {

/// A slice of at least this size is sent alone, straight from where it lies to where it goes.
/// Smaller ones are copied into one message, which costs less than several.
constexpr std::uint64_t kAloneBytes = 64 * kKiB;
/// The most elements whose codes go in one message: whole tiles, 1 MiB and scales.
constexpr std::uint64_t kCodesCount = 1024 * 1024;

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }

/// Returns the smallest number of consecutive ranks after which slices repeat.
std::size_t ranks_until_repeat(const std::vector<std::vector<WholeLayout::Slice>>& of_ranks) {
  const std::size_t world = of_ranks.size();
  for (std::size_t ranks = 1; ranks < world; ++ranks) {
    if (world % ranks != 0) continue;
    bool repeats = true;
    for (std::size_t r = ranks; r < world && repeats; ++r)
      repeats = of_ranks[r] == of_ranks[r - ranks];
    if (repeats) return ranks;
  }
  return world;
}

[[noreturn]] void refuse_gap(const WholeParam& its) {
  refuse(fmt::format(
      "whole parameter '{}' is in unit {}, but there are fewer parameters: number units "
      "from 0, without gaps",
      its.name, its.unit));
}

}  // namespace

std::uint64_t largest_unit_bytes(const std::vector<WholeParam>& wholes) {
  std::map<std::uint32_t, std::uint64_t> units;
  for (const WholeParam& whole : wholes) units[whole.unit] += whole.device_bytes();
  std::uint64_t largest_bytes = 0;
  for (const auto& [unit, unit_bytes] : units) largest_bytes = std::max(largest_bytes, unit_bytes);
  return largest_bytes;
}

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
    unit.quantized = unit.quantized || its.quantized;
    unit.elements += its.count;
    offsets_.push_back(unit.bytes);
    unit.bytes += its.device_bytes();
  }
  for (std::size_t u = 0; u < units_.size(); ++u)
    if (units_[u].wholes.empty())
      refuse(fmt::format("no whole parameter is in unit {}: number units from 0, without gaps", u));
}

void WholeLayout::set_slices(const std::vector<std::vector<Slice>>& of_ranks) {
  group_ranks_ = ranks_until_repeat(of_ranks);
  for (std::size_t w = 0; w < wholes_.size(); ++w) {
    std::uint64_t next = 0;
    for (std::size_t rank = 0; rank < group_ranks_; ++rank) {
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

std::vector<WholeLayout::Message> WholeLayout::messages_of(std::size_t rank, std::size_t unit,
                                                           WholeForm form) const {
  Message small;
  Message small_codes{.runs = {}, .quantized = true};
  std::vector<Message> alone;
  for (const std::size_t w : units_[unit].wholes) {
    const std::uint64_t count = slices_[rank][w].count;
    if (count == 0) continue;
    const bool quantized = form == WholeForm::kQuantized && wholes_[w].quantized;
    const std::uint64_t bytes =
        quantized ? quantized_bytes(kSliceBits, count) : range_of(rank, w).bytes;
    if (bytes < kAloneBytes) {
      Message& together = quantized ? small_codes : small;
      together.runs.push_back({.whole = w, .count = count, .bytes = bytes});
      together.bytes += bytes;
      continue;
    }
    const std::uint64_t most = quantized ? kCodesCount : count;
    for (std::uint64_t first = 0; first < count; first += most) {
      Run run{.whole = w, .first = first, .count = std::min(most, count - first), .bytes = bytes};
      if (quantized) run.bytes = quantized_bytes(kSliceBits, run.count);
      alone.push_back({.runs = {run}, .bytes = run.bytes, .quantized = quantized});
    }
  }
  for (Message* const together : {&small_codes, &small})
    if (together->bytes > 0) alone.insert(alone.begin(), std::move(*together));
  return alone;
}

WholeLayout::Range WholeLayout::range_of(std::size_t rank, std::size_t whole) const {
  const Slice& its = slices_[rank][whole];
  const std::size_t element_bytes = size_bytes(wholes_[whole].dtype);
  return {.begin = offsets_[whole] + its.first * element_bytes, .bytes = its.count * element_bytes};
}

WholeLayout::Range WholeLayout::range_of(std::size_t rank, const Run& run) const {
  const std::size_t element_bytes = size_bytes(wholes_[run.whole].dtype);
  return {.begin = range_of(rank, run.whole).begin + run.first * element_bytes,
          .bytes = run.count * element_bytes};
}

}  // namespace ziggurat
