// SPDX-License-Identifier: Apache-2.0
// tiers/pinned_pool.h: pinned host memory under a hard budget, lent as leases of exact size.
//
// One mapping, huge pages where they can be had, filled at creation so that nothing faults later,
// kept out of forked children (MADV_DONTFORK). Where a rank uses several NUMA nodes, each has a
// part of the mapping, in proportion to what uses it there, and a request may name the node it
// would like. That decides where in the mapping a lease lies, never whether it is given: the budget
// is one, and the parts are no regions in the sense of the rules below. Every class of work has a
// reserve of its own that holds its largest item, so each can always finish one item; the rest is
// shared. Waiters are served in order of need. Reactor's thread only, except lease destructors and
// account(), which may run on any thread. The reactor must outlive the pool and its leases.
//
// Rules that keep pipelines from locking up (one test each in tests/tiers/lease_rules_test.cc):
//   1. A work item takes all its leases in one request and never waits on the pool while holding
//      one.
//   2. Waiters are served in order of need (generation, then position in the step); demand takes
//      back clean prefetch.
//   3. Each class reserves one largest item; the sum is the smallest budget that open accepts, and
//      it says so.
//   4. Nothing in flight and someone waiting is an error with the table of lease holders, not a
//      hang.
//
// Order, precisely. A request may be served from the general region and from the reserve of its
// purpose, each if it is large enough to ever hold it: it *claims* those. While it waits, nobody of
// equal or later need takes from a region it claims. So a large waiter cannot be starved by small
// ones behind it; and since nobody claims another purpose's reserve, a waiter that its own reserve
// can serve is never blocked by one of another purpose, however soon that one's need: rule 3 would
// be worth nothing.
//
// Near a node: free memory of that node's part first, then any (node_parts.h).
//
// Cost: a call takes the time of a few look-ups in ordered sets, however many leases are out and
// however many requests wait; what it takes back it looks at one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/runtime/async.h"
#include "base/runtime/metrics.h"
#include "tiers/account.h"
#include "tiers/arena.h"
#include "tiers/host_mapping.h"
#include "tiers/host_registration.h"
#include "tiers/lease_queue.h"
#include "tiers/node_parts.h"

namespace ziggurat {

class PinnedPool;

/// A pinned buffer on loan; its destructor returns it. Move-only.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { reset(); }

  explicit operator bool() const noexcept { return data_ != nullptr; }
  std::span<std::byte> bytes() const noexcept { return {data_, size_bytes_}; }
  template <class T>
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(data_), size_bytes_ / sizeof(T)};
  }
  void reset() noexcept;

 private:
  friend class PinnedPool;
  PinnedPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

struct LeaseRequest {
  Purpose purpose = Purpose::kStaging;
  std::uint64_t size_bytes = 0;
  Need need = {};
  const char* holder = "";  ///< for the table of holders; a literal
  int numa_node = -1;       ///< where it would best lie; -1: anywhere
};

struct PinnedPoolOptions {
  struct Reserve {
    Purpose purpose;
    std::uint64_t largest_item_bytes;
  };
  /// Hard. Reserved (hugetlb) pages are used only if it is a multiple of 2 MiB.
  std::uint64_t budget_bytes = 0;
  std::vector<Reserve> reserves;  ///< rule 3
  /// Where every lease begins: at least the file's DIO memory alignment.
  std::uint64_t alignment_bytes = 4096;
  /// In proportion to their weights, in whole pages: of a small budget some get nothing.
  /// None: pages lie where they are first touched, and the kernel is asked for nothing.
  std::vector<PoolNode> nodes = {};
  bool use_huge_pages = true;
  /// When it is cancelled, whoever waits, now and later, gets its error. May be null
  CancelScope* cancel = nullptr;
  MemoryPolicy* memory_policy = nullptr;  ///< null: the kernel's
  Metrics* metrics = nullptr;             ///< counts leases near the node they asked for; or null
};

class PinnedPool {
 public:
  /// Errors: kResourceExhausted when the reserves do not fit the budget (names the smallest budget
  /// that would, by purpose) or the mapping cannot be had; kInvalidArgument for an alignment that
  /// is not a power of two up to 2 MiB, or a purpose twice.
  static std::unique_ptr<PinnedPool> create(Reactor& reactor, PinnedPoolOptions options);
  /// The smallest budget that create() accepts: the reserves, each rounded up as arena.h says.
  static std::uint64_t smallest_budget(const PinnedPoolOptions& options);
  ~PinnedPool();  ///< all leases must be back; whoever still waits gets kCancelled

  /// Waits, in order of need, until `request` fits; first takes back clean prefetch of later need.
  /// Errors: kInvalidArgument if it could never fit; kResourceExhausted with the holder table on a
  /// detected lock-up; kCancelled if the pool goes away; that of the cancelled scope.
  Task<Lease> acquire(LeaseRequest request);
  /// Without waiting: an empty lease if it does not fit now or would overtake a waiter.
  Lease try_acquire(const LeaseRequest& request);

  /// Rule 2: until withdraw(), the pool may call `give_back` (which must drop the lease before it
  /// returns) when somebody with a sooner need waits and getting it (with other offers of later
  /// need) serves him; before a lock-up is reported, also if the need is later. On the reactor's
  /// thread. For prefetched, clean buffers. A lease has one offer at a time, which ends with it.
  using ReclaimId = std::uint64_t;
  ReclaimId offer(const Lease& lease, Need need, std::function<void()> give_back);
  void withdraw(ReclaimId id);

  /// The mapping is registered with a device, until the pool goes away. A lease that the device was
  /// lost under is never lent again, nor unmapped. Once, before the first lease; null: with none.
  void keep_registered(std::shared_ptr<HostRegistration> registration);

  std::span<std::byte> mapping() const noexcept { return mapping_.bytes(); }
  Account account() const;
  std::uint64_t free_bytes() const;
  std::size_t waiting() const;
  /// Waiters and offers looked at since creation: what the pool's decisions cost, on any machine.
  std::uint64_t looked_at() const;
  /// What the mapping is made of: "2 MiB huge pages", "transparent huge pages", "4 KiB pages".
  const std::string& page_kind() const noexcept { return mapping_.page_kind(); }
  /// Which part lies on which NUMA node, in words; empty without nodes.
  const std::string& placement() const noexcept { return mapping_.placement(); }
  /// Who holds what and who waits for what: the text of a lock-up error.
  std::string holder_table() const;

 private:
  friend class Lease;
  struct Waiter;
  struct Lifetime;
  struct Offer {
    std::uint64_t serial;   // of its holder
    const std::byte* data;  // its holder's
    Need need;
    std::function<void()> give_back;
  };
  /// The latest need first; of equal ones, the first offered.
  struct OfferOrder {
    Need need;
    ReclaimId id;
    bool operator<(const OfferOrder& other) const noexcept {
      return need != other.need ? other.need < need : id < other.id;
    }
  };
  struct Region {
    Region(Purpose its_purpose, std::uint64_t base, std::uint64_t size, std::uint64_t alignment)
        : purpose(its_purpose),
          base_offset_bytes(base),
          arena(size, alignment),
          with_offers(size, alignment) {}
    Purpose purpose;  // meaningful for reserves (index > 0)
    std::uint64_t base_offset_bytes;
    Arena arena;
    Arena with_offers;  // what would be free if all offers were taken
    std::set<OfferOrder> offers;
  };
  struct Holder {
    std::uint64_t serial;
    const char* name;
    Purpose purpose;
    std::uint64_t size_bytes;
    Need need;
    std::size_t region;
    std::uint64_t offset_bytes;  // in the region's arena
    std::uint64_t range_bytes;   // what it occupies there: its size, staggered
    ReclaimId offer;             // 0: none
  };

  PinnedPool(Reactor& reactor, PinnedPoolOptions options, HostMapping mapping,
             std::span<const NodePart> parts);
  RegionSet usable(const LeaseRequest& request) const;
  void check_possible(const LeaseRequest& request) const;

  // With the mutex held:
  Lease carve(const LeaseRequest& request, RegionSet regions);
  Lease carve_from(std::size_t region, const LeaseRequest& request);
  void count_place(const LeaseRequest& request, FreeRange placed);
  Holder& holder_of(const Lease& lease);
  bool serve_from_free_memory();
  std::string table() const;
  std::vector<Offer> plan_reclaim(bool whatever_need);
  std::vector<ReclaimId> enough_offers(const LeaseRequest& request, Region& region,
                                       bool whatever_need);
  Offer end_offer(ReclaimId id);

  bool serve_waiters(bool whatever_need);
  void give_back(Lease& lease) noexcept;
  static void post_serve(Reactor& reactor, std::shared_ptr<Lifetime> lifetime);
  void fail_waiters();

  Reactor& reactor_;
  PinnedPoolOptions options_;
  HostMapping mapping_;
  std::shared_ptr<HostRegistration> registration_;  // goes before the mapping
  NodeParts parts_;
  mutable std::mutex mutex_;  // all below: leases return on any thread
  std::vector<Region> regions_;
  Account account_;
  LeaseQueue waiters_;                                    // of Waiter
  std::unordered_map<const std::byte*, Holder> holders_;  // by their lease's address
  std::unordered_map<ReclaimId, Offer> offers_;
  std::size_t quarantined_ = 0;  // holders that are leases no more
  std::uint64_t offers_looked_at_ = 0;
  ReclaimId next_reclaim_ = 1;
  std::uint64_t next_serial_ = 1;
  std::shared_ptr<Lifetime>
      lifetime_;  // what posted work holds: the pool may go away before it runs
};

}  // namespace ziggurat
