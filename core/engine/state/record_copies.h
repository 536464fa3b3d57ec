// SPDX-License-Identifier: Apache-2.0
// core/engine/state/record_copies.h: finds damaged records that other ranks can restore. Some ranks
// have the same records: all ranks in stage 0, and one rank of each shard group in a hybrid.
//
// A copy may replace a damaged record if its own rank has just verified it and both ranks' tables
// expect the same hash under the same seed. So every rank knows what can be repaired before a byte
// is sent or written. Private to core/engine.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "tiers/store/striped_store.h"

namespace ziggurat {

class RecordCopies {
 public:
  /// Makes a communicator among `members`: the ranks of `ranks` that have the same records, in
  /// order, with this rank among them.
  RecordCopies(Communicator& ranks, std::vector<int> members);

  struct Repair {
    RecordDamage damage;  ///< the rank to be repaired knows what is wrong with the record
    int from = 0;         ///< number in ranks(), like `to`
    int to = 0;
  };
  /// Plans the repairs. `damaged` has the damaged records on this rank in the store's generation;
  /// all others must have been read and verified. Removes from it the records that can be repaired.
  /// Returns the repairs of all members, in the same order on all of them: if they are made one
  /// after another, none waits forever. Every member must call this.
  Task<std::vector<Repair>> plan(const StripedStore& store, std::vector<RecordDamage>& damaged);

  Communicator& ranks() noexcept { return *ranks_; }
  /// Returns the number of `rank` (a rank of ranks()) among all ranks.
  int number(int rank) const noexcept { return members_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<int> members_;
  std::unique_ptr<Communicator> ranks_;
};

}  // namespace ziggurat
