// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsal_faults.h: what goes wrong in a rehearsal, drawn from a seed, and what
// must be true of it whatever goes wrong.
//
// Slow drives, slow ranks and late messages may only cost time. Transfers that fail, a full drive
// and a power cut may end the run, with an error on every rank. In both cases, in every order of
// what ends at one instant:
//
//   - generations follow one another, and no durable one is lost: an engine that is opened on the
//     same drives afterwards goes on from the newest that was durable on all ranks, or a later one
//   - nobody reads bytes while somebody writes them (base/access_ledger.h): no unit is used before
//     its bytes have come, no buffer is lent twice
//   - all device memory is back at the end; of host memory the pool itself checks it
//   - the sums that exist are right: gradients are zero, so the norm is
//   - where nothing fails, records are updated and written as often as without faults
//
// Not judged: what would be in the bytes, which do not exist. A run of a seed is repeated to the
// event: FaultReport::history is equal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "aio/faulty_engine.h"
#include "core/rehearsal/rehearsal.h"

namespace ziggurat {

struct RehearsalFaults {
  struct OfDrive {
    int rank;
    Fault fault;
    std::string text;
  };
  struct SlowRank {
    int rank;
    int step;       ///< from 0
    double factor;  ///< of its time to compute
  };
  struct LateMessage {
    int rank;
    std::uint64_t number;  ///< of the messages that it sends, from 0
    Nanoseconds delay;
  };
  std::vector<OfDrive> drives{};
  std::vector<SlowRank> slow_ranks{};
  std::vector<LateMessage> late_messages{};
  std::uint64_t disk_bytes = 0;        ///< room on all drives together; 0 for no limit
  std::uint64_t power_cut_events = 0;  ///< of the drives, after which power fails; 0 for never
  std::uint64_t order = 0;             ///< the seed of RehearsalRequest::order_seed

  /// Whether the run may end with an error.
  bool may_fail = false;
  /// Describes each fault in a line.
  std::vector<std::string> text() const;
};

/// How much of everything a run without faults does: where faults can strike.
struct FaultTargets {
  std::uint64_t reads = 0;  ///< of a rank
  std::uint64_t writes = 0;
  std::uint64_t syncs = 0;
  std::uint64_t messages = 0;
  std::uint64_t disk_events = 0;  ///< of all ranks
  std::uint64_t disk_bytes = 0;
  int ranks = 1;
  int steps = 1;
};
RehearsalFaults draw_faults(std::uint64_t seed, const FaultTargets& targets);

struct FaultReport {
  std::uint64_t seed = 0;
  std::vector<std::string> faults{};
  std::string ended_with{};           ///< the error of the run; empty if it trained to its end
  std::uint64_t generation = 0;       ///< of the last step that rank 0 finished
  std::uint64_t went_on_from = 0;     ///< where the engine that was opened afterwards began
  std::string did_not_open{};         ///< why there was none, which may be; else empty
  std::vector<std::string> broken{};  ///< what must be true and is not, in sentences
  std::uint64_t events = 0;           ///< transfers, exchanges, copies and kernels that began
  std::uint64_t history = 0;          ///< AccessLedger::history() and the time at the end, in one
};

/// Plays one run again and again with other faults.
class FaultCampaign {
 public:
  /// Plays the run without faults first. Every rank is played: `mirrored` must not be set. Errors:
  /// rehearse()'s.
  explicit FaultCampaign(RehearsalRequest request);

  FaultReport play(std::uint64_t seed) const;
  const FaultTargets& targets() const noexcept { return targets_; }

 private:
  RehearsalRequest request_;
  FaultTargets targets_;
  std::vector<RehearsedRank> without_;  ///< what the ranks did
};

}  // namespace ziggurat
