// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/patience.h: how long the ranks of a job wait for each other.
//
// A rank that waits asks all others, every period, whether they are there and how many pieces of
// work (a transfer, a job of a worker) they have finished. Two things end the job:
//
// - standstill: for as long as the job allows (ZIGGURAT_RANK_TIMEOUT, 10 minutes) no rank at all
//   has finished a piece of work, and no call has moved.
// - silence: a rank has not answered for half as long. Its process is stopped: nothing that a
//   reactor does itself takes as long (mapping a TB of memory takes minutes). Connections notice a
//   dead process or machine within seconds.
//
// So a rank that fills its store, verifies one or reads one for hours is waited for, directly or
// through others that wait for it. Ranks that are alive and wait for each other in calls that do
// not match finish nothing, nor does a drive that hangs or a trainer that no longer calls: they all
// come to a standstill, and the error names the calls.
//
// Only time in which this rank runs counts: while it is stopped itself, others are not silent.
// Arithmetic only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/runtime/clock.h"

namespace ziggurat {

class Patience {
 public:
  Patience(std::size_t ranks, Nanoseconds standstill);

  /// Between two ticks. Longer where there are many ranks: each asks all others.
  Nanoseconds period() const noexcept { return period_; }

  /// This rank begins to wait, at `now`: nobody owes an answer yet.
  void begin(Nanoseconds now);
  /// A period has passed. `own_work`: pieces that this rank itself has finished.
  void tick(Nanoseconds now, std::uint64_t own_work);
  /// A call of this rank made progress.
  void moved() noexcept { standing_ = {}; }
  /// `rank` answered.
  void answered(std::size_t rank, std::uint64_t work);
  /// Nothing more is to come from `rank`, and nothing is missed.
  void left(std::size_t rank) { peers_[rank].left = true; }

  /// Why the job ends here, if it does. kDeadlineExceeded.
  std::optional<std::string> verdict() const;

 private:
  struct Peer {
    std::uint64_t work = 0;
    Nanoseconds silent{0};
    bool left = false;
  };

  Nanoseconds standstill_;
  Nanoseconds period_;
  Nanoseconds silence_;
  Nanoseconds last_tick_{0};
  Nanoseconds standing_{0};  // since anybody got anything done
  std::uint64_t own_work_ = 0;
  std::vector<Peer> peers_;
};

}  // namespace ziggurat
