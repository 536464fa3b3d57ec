// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_ranks.h: what the ranks of `ziggurat train` tell each other beside the
// engine: the loss of all, and when to stop. Called from the trainer's thread by every rank alike;
// blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/communicator.h"
#include "core/engine/runtime.h"

namespace ziggurat::cli {

class TrainRanks {
 public:
  /// `runtime.ranks` are connected.
  explicit TrainRanks(Runtime& runtime);
  ~TrainRanks();
  TrainRanks(const TrainRanks&) = delete;
  TrainRanks& operator=(const TrainRanks&) = delete;

  int rank() const noexcept { return rank_; }
  int count() const noexcept { return count_; }
  /// Whose lines are the run's.
  bool first() const noexcept { return rank_ == 0; }

  struct Shared {
    double loss = 0;           ///< mean over the ranks
    bool interrupted = false;  ///< some rank was asked to end
  };
  /// Of one step. The time is counted as waiting for ranks.
  Shared share(double loss, bool interrupted);
  double mean(double value);
  /// Every rank has come here: none of them needs another any more.
  void part();

  struct Talk {
    std::uint64_t sent_here_bytes = 0;   ///< payload to ranks of this host, by this rank
    std::uint64_t sent_away_bytes = 0;   ///< and to others
    std::vector<double> waited_for_s{};  ///< by rank: the longest that any rank waited for it
  };
  Talk talk();

 private:
  std::vector<double> reduce(std::vector<double> values, Communicator::Op op);

  Runtime& runtime_;
  std::unique_ptr<Communicator> channel_;
  int rank_ = 0;
  int count_ = 1;
};

}  // namespace ziggurat::cli
