// SPDX-License-Identifier: Apache-2.0
// integrations/cli/newest_checkpoint.h: the checkpoint that a run goes on from whose store is gone
// or lost: the newest that verifies, the same for all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/checkpoint/checkpoint_reader.h"
#include "core/engine/runtime.h"
#include "integrations/cli/console.h"
#include "integrations/cli/train_ranks.h"

namespace ziggurat::cli {

class NewestCheckpoint {
 public:
  /// In `folder`, which all ranks see. The references must outlive this.
  NewestCheckpoint(Runtime& runtime, TrainRanks& ranks, Console& console, std::string folder)
      : runtime_(runtime), ranks_(ranks), console_(console), folder_(std::move(folder)) {}

  /// Every rank calls it, and gets the same: the directory of the newest checkpoint of which every
  /// byte is what was written; those that are not are named. Nothing: there is none at all. Errors:
  /// kDataLoss where there are some and none verifies.
  std::optional<std::string> find();

 private:
  std::vector<std::uint64_t> steps();
  bool verifies(const std::string& directory);
  bool damaged(const std::string& directory, const std::string& damage);
  Task<> prove_share(CheckpointReader& reader, std::size_t first, std::size_t end);

  Runtime& runtime_;
  TrainRanks& ranks_;
  Console& console_;
  std::string folder_;
};

}  // namespace ziggurat::cli
