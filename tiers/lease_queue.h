// SPDX-License-Identifier: Apache-2.0
// tiers/lease_queue.h: who waits for leases of a pool, in order of need, found without a look at
// those who must wait anyway.
//
// Requests that may be served from the same regions stand in one line, the soonest need first. If
// the head of a line cannot be served, it claims those regions, and everybody behind it stands
// still. So only heads are ever looked at, and there are as few lines as there are sets of regions:
// at most two for each purpose that has a reserve, and one for all others. Not thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace ziggurat {

/// Who needs it how soon: smaller is sooner.
struct Need {
  std::uint64_t generation = 0;
  std::uint64_t position = 0;  ///< in the step
  auto operator<=>(const Need&) const = default;
};

/// Bit r stands for region r of a pool.
using RegionSet = std::uint64_t;

class LeaseQueue {
 public:
  /// Somebody who waits. Stays where it is while it is in the queue.
  struct Entry {
    RegionSet regions = 0;  ///< that may serve it
    Need need = {};
    std::uint64_t arrival =
        0;  ///< set by insert(): of equal needs the first to come is served first
  };

  void insert(Entry& entry);
  /// Does nothing if the entry is not in the queue.
  void erase(Entry& entry);

  /// The soonest whom a region outside `claimed` may serve, or nullptr.
  Entry* soonest(RegionSet claimed) const;
  /// The regions that somebody of this need, or of a sooner one, waits for.
  RegionSet claims(const Need& need) const;

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::vector<Entry*> in_order() const;
  /// Entries looked at by soonest() and claims() since the beginning.
  std::uint64_t looked_at() const noexcept { return looked_at_; }

 private:
  struct Sooner {
    bool operator()(const Entry* a, const Entry* b) const noexcept {
      return a->need != b->need ? a->need < b->need : a->arrival < b->arrival;
    }
  };
  std::map<RegionSet, std::set<Entry*, Sooner>> lines_;
  std::size_t size_ = 0;
  std::uint64_t arrivals_ = 0;
  mutable std::uint64_t looked_at_ = 0;
};

}  // namespace ziggurat
