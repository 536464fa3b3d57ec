// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/line_history.h: the lines of history that a folder's checkpoints are of: which is
// the newest, what a state of one was made from, and which checkpoints retention lets go.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint_folder.h"

namespace ziggurat {

/// Checkpoints of one line, or those made before lines were kept (no id).
struct LineOfCheckpoints {
  std::optional<LineId> id;
  std::optional<LineId> parent;
  std::uint64_t left_at = 0;
  std::vector<CheckpointFacts> checkpoints;  ///< by step
  std::uint64_t size_bytes() const noexcept;
  /// "line 1a2b3c4d (which left line 5e6f7081 at step 10): 3 checkpoints up to step 30, 6 MiB".
  std::string description() const;
};

class LineHistory {
 public:
  explicit LineHistory(std::span<const CheckpointFacts> checkpoints);

  const std::vector<LineOfCheckpoints>& lines() const noexcept { return lines_; }
  const LineOfCheckpoints* find(const std::optional<LineId>& id) const;
  /// Lines that no other came from. Checkpoints without a line are older than all that have one.
  std::vector<const LineOfCheckpoints*> newest() const;
  /// What a state of `line` can go back to, newest first: its own checkpoints; its parent's up
  /// to the step at which it left that, and so on; last what has no line. Those with a flaw too,
  /// and those that cannot be read: they may be of any line.
  std::vector<CheckpointFacts> of(const std::optional<StateLine>& line) const;

 private:
  std::vector<LineOfCheckpoints> lines_;
  std::vector<CheckpointFacts> unreadable_;  // of no line that is known
};

/// Which checkpoints of a line stay when a new one is whole.
struct Retention {
  std::uint64_t keep_last = 0;   ///< the newest ones; 0: all
  std::uint64_t keep_every = 0;  ///< and those of every so many steps
  bool keep_best = false;        ///< and the best step's, by the newest one's "best_metric"
};
/// The steps that `retention` lets go, of those that count, ascending. The newest never is. `best`:
/// best_step() of the newest.
std::vector<std::uint64_t> expired(const std::vector<std::uint64_t>& steps, Retention retention,
                                   std::optional<std::uint64_t> best);
/// What `newest`, which was just made, lets go: of its own line, without a flaw, and older.
std::vector<CheckpointEntry> expired(std::span<const CheckpointFacts> checkpoints,
                                     Retention retention, const CheckpointFacts& newest);

}  // namespace ziggurat
