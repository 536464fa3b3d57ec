// SPDX-License-Identifier: Apache-2.0
// integrations/cli/newest_checkpoint.h: finds the checkpoint that a run goes on from, the same on
// all ranks: the newest that verifies in the run's own line of history.
//
// A newer checkpoint of a line that the run left is never taken. A checkpoint that does not verify
// is named, passed over and marked, so that retention does not count it and a save of its step may
// replace it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/line_history.h"
#include "core/engine/runtime.h"
#include "integrations/cli/console.h"
#include "integrations/cli/train_ranks.h"

namespace ziggurat::cli {

class NewestCheckpoint {
 public:
  /// Returns how the run of a checkpoint differs from this one; empty if it does not.
  using Differs = std::function<std::string(const CheckpointFacts& its)>;
  /// All ranks must see `folder`. The references must outlive this object.
  NewestCheckpoint(Runtime& runtime, TrainRanks& ranks, Console& console, std::string folder,
                   Differs differs)
      : runtime_(runtime),
        ranks_(ranks),
        console_(console),
        folder_(std::move(folder)),
        differs_(std::move(differs)) {}

  struct Found {
    std::string directory;
    /// True if the checkpoint is the newest known state of its line. Otherwise the run leaves that
    /// line at this checkpoint.
    bool continues_line = false;
  };
  /// Returns the newest checkpoint of `line` that is newer than `step` and verifies, if there is
  /// one. Every rank must call the same of newer() and newest(), and gets the same result.
  std::optional<Found> newer(const StateLine& line, std::uint64_t step);
  /// Returns the newest checkpoint of `line`, or of the run's newest line if `line` is not known,
  /// for a run without a whole store. None if the folder has no checkpoint. Errors: kDataLoss if
  /// there are checkpoints and none verifies; kInvalidArgument if no line is the newest, naming
  /// them, or if all checkpoints are of other runs.
  std::optional<Found> newest(const std::optional<StateLine>& line);
  /// Reports on rank 0's console which checkpoints of other lines the folder has.
  void say_others(const StateLine& own);

 private:
  void look();
  std::vector<CheckpointFacts> candidates(const std::optional<StateLine>& line);
  std::optional<Found> first_that_verifies(const std::vector<CheckpointFacts>& left,
                                           const std::optional<Error>& error, bool must);
  bool verifies(const std::string& directory);
  bool damaged(const std::string& directory, const std::optional<Error>& damage);
  void mark(const std::string& directory, const std::string& why);
  void unmark(const std::string& directory);
  Task<> prove_share(CheckpointReader& reader, std::size_t first, std::size_t end);

  Runtime& runtime_;
  TrainRanks& ranks_;
  Console& console_;
  std::string folder_;
  Differs differs_;
  std::optional<std::vector<CheckpointFacts>> all_;  // rank 0's
};

}  // namespace ziggurat::cli
