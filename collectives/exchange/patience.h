// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/patience.h: decides how long the ranks of a job wait for each other.
//
// A rank that waits asks all others, every period, whether they are there and how many pieces of
// work (a transfer, a job of a worker) they have finished. Two things end the job:
//
// - standstill: for as long as the job allows (ZIGGURAT_RANK_TIMEOUT, 10 minutes) no rank at all
//   has finished a piece of work, and no call has made progress.
// - silence: a rank has not answered for half as long. Then its process must be stopped, because
//   nothing that a reactor does itself takes as long (mapping a TB of memory takes minutes).
//   Connections notice a dead process or machine within seconds.
//
// So ranks wait for a rank that fills, verifies or reads its store for hours, directly or through
// other ranks that wait for it. Ranks that wait for each other in calls that do not match finish
// nothing; nor does a drive that hangs or a trainer that no longer calls. They all come to a
// standstill, and the error names the calls.
//
// Only time in which this rank runs counts: while it is stopped itself, other ranks are not silent.
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

  /// Returns the time between two ticks. It is longer with many ranks, because each asks all
  /// others.
  Nanoseconds period() const noexcept { return period_; }

  /// Notes that this rank begins to wait at `now`: no rank owes an answer yet.
  void begin(Nanoseconds now);
  /// Notes that a period has passed. `own_work` is the number of pieces of work that this rank has
  /// finished.
  void tick(Nanoseconds now, std::uint64_t own_work);
  /// Notes that a call of this rank made progress.
  void moved() noexcept { standing_ = {}; }
  /// `rank` answered.
  void answered(std::size_t rank, std::uint64_t work);
  /// Notes that `rank` has left in order, so it is not asked and not missed any more.
  void left(std::size_t rank) { peers_[rank].left = true; }

  /// Returns why the job ends now, with kDeadlineExceeded; nothing if it goes on.
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
  Nanoseconds standing_{0};  // time since any rank made progress
  std::uint64_t own_work_ = 0;
  std::vector<Peer> peers_;
};

}  // namespace ziggurat
