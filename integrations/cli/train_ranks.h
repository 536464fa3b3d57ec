// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_ranks.h: what the ranks of a command tell each other beside the engine,
// such as the mean loss and when to stop. Every rank makes the same calls from its trainer's
// thread; they block.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "collectives/communicator.h"
#include "core/engine/runtime.h"

namespace ziggurat::cli {

class TrainRanks {
 public:
  /// Makes a communicator of all ranks. `runtime.ranks` must be connected.
  explicit TrainRanks(Runtime& runtime);
  ~TrainRanks();
  TrainRanks(const TrainRanks&) = delete;
  TrainRanks& operator=(const TrainRanks&) = delete;

  int rank() const noexcept { return rank_; }
  int count() const noexcept { return count_; }
  /// Returns whether this rank prints the lines of the run.
  bool first() const noexcept { return rank_ == 0; }

  struct Shared {
    double loss = 0;           ///< mean loss over the ranks
    bool interrupted = false;  ///< some rank was asked to end
    bool save = false;         ///< some rank was asked for a checkpoint
  };
  /// Shares what this rank found in one step. The time counts as waiting for ranks.
  Shared share(const Shared& own);
  double mean(double value);
  /// Waits until every rank has called it. After that no rank needs another one any more.
  void part();

  /// Returns the communicator of all ranks. It must be used on the reactor, in the same order on
  /// each rank.
  Communicator& channel() noexcept { return *channel_; }

  /// Returns what this rank has sent since the ranks were connected.
  Traffic traffic();
  /// Returns for each rank the longest time that any rank has waited for it, in seconds.
  std::vector<double> waited_for();
  /// Returns the `own` of every rank, in the order of the ranks.
  template <class T>
  std::vector<T> all(const T& own) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> values(static_cast<std::size_t>(count_));
    values[static_cast<std::size_t>(rank_)] = own;
    gather(std::as_writable_bytes(std::span(values)), sizeof(T));
    return values;
  }

 private:
  void gather(std::span<std::byte> values, std::size_t one_bytes);
  std::vector<double> reduce(std::vector<double> values, Communicator::Op op);

  Runtime& runtime_;
  std::unique_ptr<Communicator> channel_;
  int rank_ = 0;
  int count_ = 1;
};

}  // namespace ziggurat::cli
