// SPDX-License-Identifier: Apache-2.0
// integrations/cli/newest_checkpoint.h: which checkpoint of a folder a run goes on from, the same
// for all ranks: the newest of the run's own line of history that verifies.
//
// What is newer and of a line that the run left is never taken. A checkpoint that does not verify
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
  /// How a checkpoint's run differs from this one; empty: it does not.
  using Differs = std::function<std::string(const CheckpointFacts& its)>;
  /// `folder` is one that all ranks see. The references must outlive this.
  NewestCheckpoint(Runtime& runtime, TrainRanks& ranks, Console& console, std::string folder,
                   Differs differs)
      : runtime_(runtime),
        ranks_(ranks),
        console_(console),
        folder_(std::move(folder)),
        differs_(std::move(differs)) {}

  struct Found {
    std::string directory;
    /// It is the newest state of its line that is known; else the run leaves that line with it.
    bool continues_line = false;
  };
  /// Every rank calls the same of the next two, and gets the same.
  /// The newest of `line` that is newer than `step`; nothing: none that verifies.
  std::optional<Found> newer(const StateLine& line, std::uint64_t step);
  /// Where there is no store, or none that is whole: the newest of its `line`; where that is not
  /// known, of the newest line of this run. Nothing: there is none at all. Errors: kDataLoss where
  /// there are some and none verifies; kInvalidArgument where no line is the newest, naming them,
  /// or all are another run's.
  std::optional<Found> newest(const std::optional<StateLine>& line);
  /// What other lines have in the folder, for rank 0's console.
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
