// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/line_history.cc: finds parents and children among lines of history.
#include "core/checkpoint/line_history.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <ranges>
#include <set>

#include "base/bytes.h"

namespace ziggurat {

std::uint64_t LineOfCheckpoints::size_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const CheckpointFacts& its : checkpoints) total += its.size_bytes;
  return total;
}

std::string LineOfCheckpoints::description() const {
  const std::string name = id ? "line " + short_text(*id) : "no line (old)";
  const std::string from =
      parent ? fmt::format(" (which left line {} at step {})", short_text(*parent), left_at) : "";
  const std::size_t count = checkpoints.size();
  const std::string text = fmt::format(
      "{}{} with {} checkpoint{} up to step {}, {}", name, from, count, count == 1 ? "" : "s",
      count == 0 ? 0 : checkpoints.back().entry.step, format_bytes(size_bytes()));
  if (count == 0 || std::ranges::any_of(checkpoints, &CheckpointFacts::readable)) return text;
  // The name may itself be part of the damage, so whoever reads it has to know where it is from.
  return fmt::format("{}, of which only the name can be read: {}", text, checkpoints.back().flaw);
}

LineHistory::LineHistory(std::span<const CheckpointFacts> checkpoints) {
  std::map<std::optional<LineId>, LineOfCheckpoints> by_id;
  for (const CheckpointFacts& its : checkpoints) {
    if (!its.readable && !its.line) {
      unreadable_.push_back(its);
      continue;
    }
    LineOfCheckpoints& line = by_id[its.line_id()];
    line.id = its.line_id();
    if (its.line && (its.readable || line.checkpoints.empty())) {
      line.parent = its.line->parent;
      line.left_at = its.line->left_at;
    }
    line.checkpoints.push_back(its);
  }
  for (auto& [id, line] : by_id) {
    std::ranges::sort(line.checkpoints, {}, &CheckpointFacts::entry);
    lines_.push_back(std::move(line));
  }
}

const LineOfCheckpoints* LineHistory::find(const std::optional<LineId>& id) const {
  const auto found = std::ranges::find(lines_, id, &LineOfCheckpoints::id);
  return found == lines_.end() ? nullptr : &*found;
}

std::optional<LineId> LineHistory::left_by(const LineOfCheckpoints& line) const {
  if (!line.parent || line.parent == line.id) return std::nullopt;
  return find(line.parent) != nullptr ? line.parent : std::nullopt;
}

std::optional<LineId> LineHistory::that_left(const LineOfCheckpoints& line) const {
  if (!line.id) return std::nullopt;
  for (const LineOfCheckpoints& its : lines_) {
    if (its.parent == line.id && its.id != line.id) return its.id;
  }
  return std::nullopt;
}

std::vector<const LineOfCheckpoints*> LineHistory::newest() const {
  std::set<LineId> parents;
  for (const LineOfCheckpoints& line : lines_) {
    if (line.parent && line.parent != line.id) parents.insert(*line.parent);
  }
  std::vector<const LineOfCheckpoints*> all;
  for (const LineOfCheckpoints& line : lines_) {
    const bool older = line.id ? parents.contains(*line.id) : lines_.size() > 1;
    if (!older) all.push_back(&line);
  }
  return all;
}

std::vector<CheckpointFacts> LineHistory::of(const std::optional<StateLine>& of) const {
  std::vector<CheckpointFacts> all;
  std::set<LineId> seen;
  std::uint64_t limit = UINT64_MAX;
  const auto add = [&](const LineOfCheckpoints& line) {
    for (const CheckpointFacts& its : std::views::reverse(line.checkpoints)) {
      if (its.entry.step <= limit) all.push_back(its);
    }
  };
  std::optional<StateLine> next = of;
  while (next && seen.insert(next->id).second) {
    if (const LineOfCheckpoints* const line = find(next->id)) {
      add(*line);
      next->parent = line->parent;
      next->left_at = line->left_at;
    }
    limit = std::min(limit, next->left_at);
    if (!next->parent) break;
    const LineOfCheckpoints* const parent = find(next->parent);
    if (parent == nullptr) break;
    next = StateLine{
        .id = *parent->id, .epoch = 0, .parent = parent->parent, .left_at = parent->left_at};
  }
  all.insert(all.end(), unreadable_.begin(), unreadable_.end());
  std::ranges::stable_sort(all, std::greater{},
                           [](const CheckpointFacts& its) { return its.entry.step; });
  limit = UINT64_MAX;
  if (const LineOfCheckpoints* const before = find(std::nullopt)) add(*before);
  return all;
}

std::vector<std::uint64_t> expired(const std::vector<std::uint64_t>& steps, Retention retention,
                                   std::optional<std::uint64_t> best) {
  std::vector<std::uint64_t> gone;
  if (retention.keep_last == 0) return gone;
  const std::uint64_t older =
      steps.size() - std::min<std::uint64_t>(steps.size(), retention.keep_last);
  const auto is_best = [&](std::uint64_t i) {
    // True for the best step, or for the first after it if the best was not saved.
    return retention.keep_best && best && steps[i] >= *best && (i == 0 || steps[i - 1] < *best);
  };
  for (std::uint64_t i = 0; i < older; ++i) {
    const bool stays = retention.keep_every > 0 && steps[i] % retention.keep_every == 0;
    if (!stays && !is_best(i)) gone.push_back(steps[i]);
  }
  return gone;
}

std::vector<CheckpointEntry> expired(std::span<const CheckpointFacts> checkpoints,
                                     Retention retention, const CheckpointFacts& newest) {
  std::map<std::uint64_t, CheckpointEntry> own;
  for (const CheckpointFacts& its : checkpoints) {
    const bool is_older = its.entry.step < newest.entry.step;
    if (its.counts() && is_older && its.line_id() == newest.line_id())
      own[its.entry.step] = its.entry;
  }
  own[newest.entry.step] = newest.entry;
  std::vector<std::uint64_t> steps;
  for (const auto& [step, entry] : own) steps.push_back(step);
  std::vector<CheckpointEntry> gone;
  for (const std::uint64_t step : expired(steps, retention, newest.best_step))
    gone.push_back(own[step]);
  return gone;
}

}  // namespace ziggurat
