// SPDX-License-Identifier: Apache-2.0
// tiers/pool/pinned_pool.h: pinned host memory under a hard budget, lent as leases of exact size.
//
// The pool is one mapping, with huge pages if the machine gives them. It is filled at creation, so
// that nothing faults later, and kept out of forked children (MADV_DONTFORK). If a rank uses
// several NUMA nodes, each has a part of the mapping, in proportion to its use there, and a request
// may name the node that it prefers. That decides where in the mapping a lease lies, never whether
// it is given: there is one budget, and the parts are not regions in the sense of the rules below.
// Every class of work has a reserve of its own that holds its largest item, so each can always
// finish one item; the rest is shared. Waiters are served in order of need. Reactor's thread only,
// except lease destructors and account(), which may run on any thread. The reactor must outlive the
// pool and its leases.
//
// Rules that keep pipelines from locking up (one test each in tests/tiers/lease_rules_test.cc):
// 1. A work item takes all its leases in one request, and never waits on the pool while it holds
//   one.
// 2. Waiters are served in order of need (generation, then position in the step); demand takes back
//   clean prefetch.
// 3. Each class reserves one largest item; the sum is the smallest budget that open accepts, and
//   open says so.
// 4. If nothing is in flight and a request waits, that is an error with the table of lease holders,
//   not a hang.
//
// The order in detail. A request may be served from the general region and from the reserve of its
// purpose, each if it is large enough to ever hold it: the request *claims* these. While it waits,
// no request of equal or later need takes memory from a region that it claims. So small requests
// behind a large one cannot starve it. A request never claims the reserve of another purpose. So a
// request that its own reserve can serve is never blocked by one of another purpose, however soon
// that one's need; otherwise rule 3 would be worth nothing.
//
// If a request names a node, free memory of that node's part is used first, then any
// (node_parts.h).
//
// Cost: a call takes the time of a few look-ups in ordered sets, no matter how many leases are lent
// and how many requests wait. The offers that it takes back are looked at one by one.
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

#include "base/absent_memory.h"
#include "base/runtime/async.h"
#include "base/runtime/metrics.h"
#include "tiers/pool/account.h"
#include "tiers/pool/arena.h"
#include "tiers/pool/host_mapping.h"
#include "tiers/pool/host_registration.h"
#include "tiers/pool/lease_queue.h"
#include "tiers/pool/node_parts.h"

namespace ziggurat {

class PinnedPool;

/// A pinned buffer that is lent; its destructor gives it back. Move-only.
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
  const char* holder = "";  ///< a literal, for the table of holders
  int numa_node = -1;       ///< where it should best lie; -1 for anywhere
  /// Kept for the whole run. It never takes from a reserve, which is for items that come back.
  bool for_good = false;
  /// Its bytes decide something, so they exist even in a pool without memory.
  bool decides = false;
};

struct PinnedPoolOptions {
  struct Reserve {
    Purpose purpose;
    std::uint64_t largest_item_bytes;
  };
  /// A hard limit. Reserved (hugetlb) pages are used only if it is a multiple of 2 MiB.
  std::uint64_t budget_bytes = 0;
  std::vector<Reserve> reserves;  ///< see rule 3
  /// The alignment of every lease: at least the file's DIO memory alignment.
  std::uint64_t alignment_bytes = 4096;
  /// NUMA nodes that get parts of the mapping by their weights, in whole pages; with a small budget
  /// some get none. If empty, pages lie where they are first touched, and the kernel is not asked
  /// for anything.
  std::vector<PoolNode> nodes = {};
  bool use_huge_pages = true;
  /// When it is cancelled, every request that waits, now or later, gets its error. May be null.
  CancelScope* cancel = nullptr;
  MemoryPolicy* memory_policy = nullptr;  ///< null means the kernel's
  /// Where the pool is if it has no memory: it outlives the pool. Null for a pool of memory.
  AbsentMemory* absent = nullptr;
  Metrics* metrics = nullptr;  ///< counts leases near the node that they asked for; may
                               ///< be null
};

class PinnedPool {
 public:
  /// Makes a pool. Errors: kResourceExhausted if the reserves do not fit the budget (naming the
  /// smallest budget that would do, by purpose) or the machine cannot give the mapping;
  /// kInvalidArgument for an alignment that is not a power of two up to 2 MiB, or a purpose that is
  /// given twice.
  static std::unique_ptr<PinnedPool> create(Reactor& reactor, PinnedPoolOptions options);
  /// Returns the smallest budget that create() accepts: the reserves, each rounded up as arena.h
  /// says.
  static std::uint64_t smallest_budget(const PinnedPoolOptions& options);
  ~PinnedPool();  ///< all leases must be back; requests that still wait get kCancelled

  /// Waits, in order of need, until `request` fits; first takes back clean prefetch of later need.
  /// Errors: kInvalidArgument if it could never fit; kResourceExhausted, with the table of holders,
  /// if a lock-up is detected; kCancelled if the pool is destroyed; the error of a cancelled scope.
  Task<Lease> acquire(LeaseRequest request);
  /// Takes a lease without waiting: an empty one if it does not fit now or would overtake a waiter.
  Lease try_acquire(const LeaseRequest& request);

  /// Offers to give back a lease of a prefetched, clean buffer (rule 2). Until withdraw(), the pool
  /// may call `give_back`, which must drop the lease before it returns, on the reactor's thread. It
  /// does so if a request of sooner need waits and this offer, with others of later need, serves
  /// it. Before it reports a lock-up, it does so for requests of any need. A lease has one offer at
  /// a time, which ends with the lease.
  using ReclaimId = std::uint64_t;
  ReclaimId offer(const Lease& lease, Need need, std::function<void()> give_back);
  void withdraw(ReclaimId id);

  /// Keeps the mapping registered with a device until the pool is destroyed. A lease under which
  /// the device was lost is never lent again, nor unmapped. Called once, before the first lease;
  /// null if there is no registration.
  void keep_registered(std::shared_ptr<HostRegistration> registration);

  std::span<std::byte> mapping() const noexcept { return mapping_.bytes(); }
  Account account() const;
  std::uint64_t free_bytes() const;
  std::size_t waiting() const;
  /// Returns how many waiters and offers were looked at since creation, which is the cost of the
  /// pool's decisions on any machine.
  std::uint64_t looked_at() const;
  /// Returns the kind of the mapping's pages: "2 MiB huge pages", "transparent huge pages", "4 KiB
  /// pages".
  const std::string& page_kind() const noexcept { return mapping_.page_kind(); }
  /// Describes which part lies on which NUMA node; empty without nodes.
  const std::string& placement() const noexcept { return mapping_.placement(); }
  /// Describes the holders and the waiters: the text of a lock-up error.
  std::string holder_table() const;

 private:
  friend class Lease;
  struct Waiter;
  struct Lifetime;
  struct Offer {
    std::uint64_t serial;   // serial of its holder
    const std::byte* data;  // address of its holder's lease
    Need need;
    std::function<void()> give_back;
  };
  /// Orders offers: the latest need first; of equal needs, the first offered.
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
    Purpose purpose;  // has a meaning for reserves only (index > 0)
    std::uint64_t base_offset_bytes;
    Arena arena;
    Arena with_offers;  // ranges that would be free if all offers were taken back
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
    std::uint64_t range_bytes;   // bytes that it occupies there: its size, staggered
    ReclaimId offer;             // 0 if there is none
  };

  PinnedPool(Reactor& reactor, PinnedPoolOptions options, HostMapping mapping,
             std::span<const NodePart> parts);
  RegionSet usable(const LeaseRequest& request) const;
  void check_possible(const LeaseRequest& request) const;

  // These are called with the mutex held:
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
  std::shared_ptr<HostRegistration> registration_;  // destroyed before the mapping
  NodeParts parts_;
  mutable std::mutex mutex_;  // guards everything below, because leases return on any thread
  std::vector<Region> regions_;
  Account account_;
  LeaseQueue waiters_;                                    // entries are Waiters
  std::unordered_map<const std::byte*, Holder> holders_;  // by the address of their lease
  std::unordered_map<ReclaimId, Offer> offers_;
  std::size_t quarantined_ = 0;  // holders of leases that will never come back
  std::uint64_t offers_looked_at_ = 0;
  ReclaimId next_reclaim_ = 1;
  std::uint64_t next_serial_ = 1;
  std::shared_ptr<Lifetime>
      lifetime_;  // held by posted work, because the pool may be gone before it runs
};

}  // namespace ziggurat
