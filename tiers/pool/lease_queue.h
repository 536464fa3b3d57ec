// SPDX-License-Identifier: Apache-2.0
// tiers/pool/lease_queue.h: the requests that wait for leases of a pool, in order of need. It finds
// the next one to serve without looking at those that must wait anyway.
//
// Requests that may be served from the same regions stand in one line, the soonest need first. If
// the head of a line cannot be served, it claims those regions, and all requests behind it wait. So
// only heads are ever looked at, and there are as few lines as there are sets of regions: at most
// two for each purpose that has a reserve, and one for all others. Not thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace ziggurat {

/// How soon a request is needed; smaller is sooner.
struct Need {
  std::uint64_t generation = 0;
  std::uint64_t position = 0;  ///< position in the step
  auto operator<=>(const Need&) const = default;
};

/// A set of regions of a pool: bit r means region r.
using RegionSet = std::uint64_t;

class LeaseQueue {
 public:
  /// A request that waits. It must not move while it is in the queue.
  struct Entry {
    RegionSet regions = 0;  ///< regions that may serve it
    Need need = {};
    std::uint64_t arrival =
        0;  ///< set by insert(), because of equal needs the first to come is served first
  };

  void insert(Entry& entry);
  /// Removes the entry. Does nothing if it is not in the queue.
  void erase(Entry& entry);

  /// Returns the soonest request that a region outside `claimed` may serve, or nullptr.
  Entry* soonest(RegionSet claimed) const;
  /// Returns the regions for which a request of this need, or of a sooner one, waits.
  RegionSet claims(const Need& need) const;

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::vector<Entry*> in_order() const;
  /// Returns how many entries soonest() and claims() have looked at since the beginning.
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
