// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/line_history.h: the lines of history of a folder's checkpoints: which line is the
// newest, which checkpoints a state came from, and which ones retention lets go.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint_folder.h"

namespace ziggurat {

/// Checkpoints of one line, or those that were made before lines were recorded (no id). A line also
/// has the checkpoints of which nothing else can be read.
struct LineOfCheckpoints {
  std::optional<LineId> id;
  std::optional<LineId> parent;
  std::uint64_t left_at = 0;
  std::vector<CheckpointFacts> checkpoints;  ///< by step
  std::uint64_t size_bytes() const noexcept;
  /// Describes the line: "line 1a2b3c4d (which left line 5e6f7081 at step 10) with 3 checkpoints up
  /// to step 30, 6 MiB". Where only the name can be read it says why.
  std::string description() const;
};

class LineHistory {
 public:
  explicit LineHistory(std::span<const CheckpointFacts> checkpoints);

  const std::vector<LineOfCheckpoints>& lines() const noexcept { return lines_; }
  const LineOfCheckpoints* find(const std::optional<LineId>& id) const;
  /// The line that `line` left, and a line that left `line`; nothing if the folder has none.
  std::optional<LineId> left_by(const LineOfCheckpoints& line) const;
  std::optional<LineId> that_left(const LineOfCheckpoints& line) const;
  /// Lines that no other line came from. Checkpoints without a line are older than all lines.
  std::vector<const LineOfCheckpoints*> newest() const;
  /// Returns the checkpoints that a state of `line` can go back to, newest first: those of its own
  /// line; those of its parent up to the step at which it left the parent, and so on; last those
  /// without a line. Checkpoints with a flaw are among them, and those whose line cannot be read,
  /// which may be of any line.
  std::vector<CheckpointFacts> of(const std::optional<StateLine>& line) const;

 private:
  std::vector<LineOfCheckpoints> lines_;
  std::vector<CheckpointFacts> unreadable_;  // checkpoints whose line cannot be read
};

/// Says which checkpoints of a line stay when a new one is whole.
struct Retention {
  std::uint64_t keep_last = 0;   ///< the newest ones; 0 keeps all
  std::uint64_t keep_every = 0;  ///< also those of every so many steps
  bool keep_best = false;        ///< also the best step's, by the newest one's "best_metric"
};
/// Returns those of the ascending `steps`, all of usable checkpoints, that `retention` lets go. The
/// newest is never among them. `best` is best_step() of the newest.
std::vector<std::uint64_t> expired(const std::vector<std::uint64_t>& steps, Retention retention,
                                   std::optional<std::uint64_t> best);
/// Returns the checkpoints that `newest`, which was just made, lets go: older ones of its own line
/// without a flaw.
std::vector<CheckpointEntry> expired(std::span<const CheckpointFacts> checkpoints,
                                     Retention retention, const CheckpointFacts& newest);

}  // namespace ziggurat
