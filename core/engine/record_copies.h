// SPDX-License-Identifier: Apache-2.0
// core/engine/record_copies.h: the ranks that have the same records as this one (all of them in
// stage 0, one of each shard group in a hybrid), and which of them can give back what another's
// drive has lost.
//
// A copy is the record that was lost if its own rank has just proved it, and both ranks' tables
// expect the same hash under the same seed. So what can be repaired is known, on every rank, before
// a byte is sent or written. Private to core/engine.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "tiers/striped_store.h"

namespace ziggurat {

class RecordCopies {
 public:
  /// `members`: those ranks of `ranks`, in order, this one among them.
  RecordCopies(Communicator& ranks, std::vector<int> members);

  struct Repair {
    RecordDamage damage;  ///< its fault is known to the rank that it is repaired on
    int from = 0;         ///< rank of ranks()
    int to = 0;
  };
  /// `damaged`: the records here of the store's generation that are not what was written; all
  /// others have been read and proved. Takes from it what can be repaired. The repairs of all
  /// members, in an order that all have alike: made one after the other, none waits for ever. Every
  /// member calls.
  Task<std::vector<Repair>> plan(const StripedStore& store, std::vector<RecordDamage>& damaged);

  Communicator& ranks() noexcept { return *ranks_; }
  /// Its number among all ranks.
  int number(int rank) const noexcept { return members_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<int> members_;
  std::unique_ptr<Communicator> ranks_;
};

}  // namespace ziggurat
