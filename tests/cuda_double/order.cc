// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/order.cc: see order.h. History is kept by intervals, since copies and kernels
// touch long runs of bytes.
#include "tests/cuda_double/order.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace ziggurat::cuda_double {

void Clock::merge(const Clock& other) {
  if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size());
  for (std::size_t i = 0; i < other.ticks_.size(); ++i) {
    ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }
}

void Clock::set(Actor actor, std::uint64_t tick) {
  if (ticks_.size() <= actor) ticks_.resize(actor + 1);
  ticks_[actor] = tick;
}

Range range_of(const void* address, std::size_t size_bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  return {begin, begin + size_bytes};
}

void AccessHistory::split_at(std::uintptr_t address) {
  auto after = cells_.upper_bound(address);
  if (after == cells_.begin()) return;
  const auto cell = std::prev(after);
  if (cell->first == address || cell->second.end <= address) return;
  Cell upper = cell->second;
  cell->second.end = address;
  cells_.emplace(address, std::move(upper));
}

void AccessHistory::fill(Range range) {
  std::uintptr_t at = range.begin;
  auto cell = cells_.lower_bound(range.begin);
  while (at < range.end) {
    const std::uintptr_t next = cell == cells_.end() ? range.end : std::min(cell->first, range.end);
    if (at < next) cells_.emplace_hint(cell, at, Cell{next, {}, {}});
    if (cell == cells_.end() || cell->first >= range.end) break;
    at = cell->second.end;
    ++cell;
  }
}

std::optional<std::string> AccessHistory::race(std::uintptr_t begin, const Cell& cell,
                                               const Access& access, const Act& act) {
  const auto unknown = [&](const Touch& touch) {
    return touch.what && touch.actor != act.actor && act.knew.of(touch.actor) < touch.tick;
  };
  const auto text = [&](const Touch& touch, const char* verb) {
    return fmt::format("{} {} {:#x}, but nothing orders it after {}, which {} it", act.what,
                       access.writes ? "writes" : "reads", begin, *touch.what, verb);
  };
  if (unknown(cell.write)) return text(cell.write, "wrote");
  if (!access.writes) return std::nullopt;
  for (const Touch& read : cell.reads) {
    if (unknown(read)) return text(read, "read");
  }
  return std::nullopt;
}

std::optional<std::string> AccessHistory::add(const Access& access, const Act& act) {
  if (access.range.begin >= access.range.end) return std::nullopt;
  split_at(access.range.begin);
  split_at(access.range.end);
  fill(access.range);
  const Touch touch{act.actor, act.tick, std::make_shared<const std::string>(act.what)};
  std::optional<std::string> found;
  const auto end = cells_.lower_bound(access.range.end);
  for (auto cell = cells_.lower_bound(access.range.begin); cell != end; ++cell) {
    if (!found) found = race(cell->first, cell->second, access, act);
    if (access.writes) {
      cell->second.write = touch;
      cell->second.reads.clear();
      continue;
    }
    auto& reads = cell->second.reads;
    const auto mine = std::find_if(reads.begin(), reads.end(),
                                   [&](const Touch& read) { return read.actor == act.actor; });
    if (mine == reads.end()) {
      reads.push_back(touch);
    } else {
      *mine = touch;
    }
  }
  return found;
}

void AccessHistory::forget(Range range) {
  split_at(range.begin);
  split_at(range.end);
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

}  // namespace ziggurat::cuda_double
