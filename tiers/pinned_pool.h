// SPDX-License-Identifier: Apache-2.0
// tiers/pinned_pool.h: pinned host memory under a hard budget, lent as leases of exact size.
//
// One mapping per NUMA node, huge pages where they can be had, filled at creation so that nothing faults later, kept out of
// forked children (MADV_DONTFORK). Every class of work has a reserve of its own that holds its largest item, so each can
// always finish one item; the rest is shared. Waiters are served in order of need. Reactor's thread only, except lease
// destructors, which may run on any thread.
//
// Rules that keep pipelines from locking up (one test each in tests/tiers/lease_rules_test.cc):
//   1. A work item takes all its leases in one request and never waits on the pool while holding one.
//   2. Waiters are served in order of need (generation, then position in the step); demand takes back clean prefetch.
//   3. Each class reserves one largest item; the sum is the smallest budget that open accepts, and it says so.
//   4. Nothing in flight and someone waiting is an error with the table of lease holders, not a hang.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/runtime/async.h"
#include "tiers/account.h"
#include "tiers/arena.h"

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
  Purpose purpose_ = Purpose::kStaging;
  std::int16_t region_ = 0;  // which arena it came from
};

/// Who needs it how soon: smaller is sooner.
struct Need {
  std::uint64_t generation = 0;
  std::uint64_t position = 0;  ///< in the step
  auto operator<=>(const Need&) const = default;
};

struct LeaseRequest {
  Purpose purpose = Purpose::kStaging;
  std::uint64_t size_bytes = 0;
  Need need;
  const char* holder = "";  ///< for the table of holders; a literal
};

struct PinnedPoolOptions {
  struct Reserve {
    Purpose purpose;
    std::uint64_t largest_item_bytes;
  };
  std::uint64_t budget_bytes = 0;
  std::vector<Reserve> reserves;      ///< rule 3
  std::uint64_t alignment_bytes = 4096;  ///< of every lease: at least the file's DIO memory alignment
  int numa_node = -1;                 ///< -1: no binding
  bool use_huge_pages = true;
};

class PinnedPool {
 public:
  /// Errors: kResourceExhausted when the reserves do not fit the budget (names the smallest budget that would, by purpose)
  /// or the mapping cannot be had.
  static std::unique_ptr<PinnedPool> create(Reactor& reactor, PinnedPoolOptions options);
  ~PinnedPool();  ///< all leases must be back

  /// Waits, in order of need, until `request` fits; first takes back clean prefetch of later need.
  /// Errors: kInvalidArgument if it could never fit; kResourceExhausted with the holder table on a detected lock-up.
  Task<Lease> acquire(LeaseRequest request);
  /// Without waiting: an empty lease if it does not fit now or would overtake a waiter.
  Lease try_acquire(const LeaseRequest& request);

  /// Rule 2: until withdraw(), the pool may call `give_back` (which must drop the lease before it returns) when somebody
  /// with a sooner need waits. For prefetched, clean buffers.
  using ReclaimId = std::uint64_t;
  ReclaimId offer(const Lease& lease, Need need, std::function<void()> give_back);
  void withdraw(ReclaimId id);

  std::span<std::byte> mapping() const noexcept { return {base_, mapping_bytes_}; }
  Account account() const;
  std::uint64_t free_bytes() const;
  std::size_t waiting() const noexcept { return waiters_.size(); }
  /// What the mapping is made of: "2 MiB huge pages", "transparent huge pages", "4 KiB pages".
  const std::string& page_kind() const noexcept { return page_kind_; }
  /// Who holds what and who waits for what: the text of a lock-up error.
  std::string holder_table() const;

 private:
  friend class Lease;
  struct Waiter;
  struct Offer;
  struct Region {
    Purpose purpose;  // meaningful for reserves (index > 0)
    std::uint64_t base_offset_bytes;
    Arena arena;
  };

  PinnedPool(Reactor& reactor, PinnedPoolOptions options);
  Lease carve(const LeaseRequest& request);
  void serve_waiters();
  void give_back(Lease& lease) noexcept;
  void fail_waiters();

  Reactor& reactor_;
  PinnedPoolOptions options_;
  std::byte* base_ = nullptr;
  std::uint64_t mapping_bytes_ = 0;
  std::string page_kind_;
  mutable std::mutex mutex_;  // arenas, account and holders: leases return on any thread
  std::vector<Region> regions_;
  Account account_;
  std::list<Waiter*> waiters_;  // sorted by need
  std::vector<std::unique_ptr<Offer>> offers_;
  struct Holder {
    const std::byte* data;
    const char* name;
    Purpose purpose;
    std::uint64_t size_bytes;
    Need need;
  };
  std::vector<Holder> holders_;
  ReclaimId next_reclaim_ = 1;
};

}  // namespace ziggurat
