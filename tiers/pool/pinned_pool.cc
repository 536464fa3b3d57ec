// SPDX-License-Identifier: Apache-2.0
// tiers/pool/pinned_pool.cc: one general region and a reserve per class, each an Arena; the order
// of service, the return of offers, and the detection of lock-ups.
//
// The reserve of a class always has room for its largest item if no item of the class is lent: only
// this class may use the reserve, the reserve is as long as the largest item, and it is then one
// free range.
#include "tiers/pool/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/memory_exhausted.h"

namespace ziggurat {

/// Tells posted work whether the pool still exists, so it lives as long as such work may ask. The
/// mutex is recursive, because a coroutine that ends while waiters are served may destroy its own
/// waiter.
struct PinnedPool::Lifetime {
  std::recursive_mutex mutex;
  PinnedPool* pool;
};

/// A request that waits; lives in the frame of acquire(). Leaves the queue when served, failed or
/// destroyed.
struct PinnedPool::Waiter : LeaseQueue::Entry {
  Waiter(PinnedPool& pool, const LeaseRequest& wanted)
      : Entry{.regions = pool.usable(wanted), .need = wanted.need},
        request(wanted),
        granted(pool.options_.cancel != nullptr ? Signal(*pool.options_.cancel)
                                                : Signal(pool.reactor_)),
        lifetime(pool.lifetime_) {
    const std::lock_guard lock(pool.mutex_);
    pool.waiters_.insert(*this);
  }
  ~Waiter() {
    const std::lock_guard alive(lifetime->mutex);
    if (lifetime->pool == nullptr) return;
    const std::lock_guard lock(lifetime->pool->mutex_);
    lifetime->pool->waiters_.erase(*this);
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  LeaseRequest request;
  Lease lease;
  Signal granted;
  std::shared_ptr<Lifetime> lifetime;
};

Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

void Lease::reset() noexcept {
  if (pool_ == nullptr) return;
  pool_->give_back(*this);
  pool_ = nullptr;
  data_ = nullptr;
  size_bytes_ = 0;
}

std::uint64_t PinnedPool::smallest_budget(const PinnedPoolOptions& options) {
  std::uint64_t sum = 0;
  for (const auto& reserve : options.reserves) {
    sum += staggered_bytes(reserve.largest_item_bytes, options.alignment_bytes);
  }
  return sum;
}

std::unique_ptr<PinnedPool> PinnedPool::create(Reactor& reactor, PinnedPoolOptions options) {
  if (!std::has_single_bit(options.alignment_bytes) || options.alignment_bytes > kHugePageBytes) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "the alignment of the pinned pool is {} bytes, but must be a power of two up to 2 MiB",
            options.alignment_bytes));
  }
  std::string parts;
  for (const auto& reserve : options.reserves) {
    const auto same = [&](const auto& other) { return other.purpose == reserve.purpose; };
    if (std::count_if(options.reserves.begin(), options.reserves.end(), same) > 1) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the pinned pool has two reserves for {}; give one",
                              to_string(reserve.purpose)));
    }
    parts += fmt::format(
        "{}{} {}", parts.empty() ? "" : " + ", to_string(reserve.purpose),
        format_bytes(staggered_bytes(reserve.largest_item_bytes, options.alignment_bytes)));
  }
  const std::uint64_t smallest = std::max(smallest_budget(options), options.alignment_bytes);
  if (options.budget_bytes < smallest) {
    throw MemoryExhausted({.budget = MemoryBudget::kHost,
                           .had_bytes = options.budget_bytes,
                           .needed_bytes = smallest,
                           .smallest_bytes = smallest},
                          fmt::format("a host memory budget of {} is too small: the "
                                      "smallest that works is {} "
                                      "({} bytes), one largest item of each class: {}",
                                      format_bytes(options.budget_bytes), format_bytes(smallest),
                                      smallest, parts.empty() ? "none" : parts));
  }
  options.budget_bytes = options.budget_bytes / options.alignment_bytes * options.alignment_bytes;
  if (options.absent != nullptr) {
    HostMapping none = HostMapping::without_memory(*options.absent, options.budget_bytes);
    return std::unique_ptr<PinnedPool>(
        new PinnedPool(reactor, std::move(options), std::move(none), {}));
  }
  const std::uint64_t page = options.use_huge_pages ? kHugePageBytes : kSmallPageBytes;
  const HostMappingOptions mapping{
      .owner = "pinned pool",
      .size_bytes = options.budget_bytes,
      .parts = parts_by_weight(options.budget_bytes, page, options.nodes),
      .huge_pages = options.use_huge_pages,
      .lock = true,
      .policy = options.memory_policy};
  // Reserved pages would overdraw or cut a budget that is not a number of whole huge pages.
  if (options.use_huge_pages && options.budget_bytes % kHugePageBytes == 0) {
    if (auto reserved = HostMapping::reserved(mapping)) {
      return std::unique_ptr<PinnedPool>(
          new PinnedPool(reactor, std::move(options), std::move(*reserved), mapping.parts));
    }
  }
  return std::unique_ptr<PinnedPool>(
      new PinnedPool(reactor, std::move(options), HostMapping(mapping), mapping.parts));
}

PinnedPool::PinnedPool(Reactor& reactor, PinnedPoolOptions options, HostMapping mapping,
                       std::span<const NodePart> parts)
    : reactor_(reactor),
      options_(std::move(options)),
      mapping_(std::move(mapping)),
      parts_(parts),
      account_(options_.budget_bytes),
      lifetime_(std::make_shared<Lifetime>()) {
  lifetime_->pool = this;
  const std::uint64_t general = options_.budget_bytes - smallest_budget(options_);
  regions_.emplace_back(Purpose::kCount, 0, general, options_.alignment_bytes);
  std::uint64_t base = general;
  for (const auto& reserve : options_.reserves) {
    const std::uint64_t size =
        staggered_bytes(reserve.largest_item_bytes, options_.alignment_bytes);
    regions_.emplace_back(reserve.purpose, base, size, options_.alignment_bytes);
    base += size;
  }
  // Handlers cannot be removed from the reactor, so this one checks whether the pool still exists.
  reactor_.on_stall([lifetime = lifetime_] {
    const std::lock_guard alive(lifetime->mutex);
    if (lifetime->pool != nullptr) lifetime->pool->fail_waiters();
  });
}

void PinnedPool::keep_registered(std::shared_ptr<HostRegistration> registration) {
  const std::lock_guard lock(mutex_);
  ZIGGURAT_CHECK(holders_.empty(), "a pool is registered before its first lease");
  registration_ = std::move(registration);
}

PinnedPool::~PinnedPool() {
  const std::lock_guard alive(lifetime_->mutex);
  lifetime_->pool = nullptr;
  const std::lock_guard lock(mutex_);
  ZIGGURAT_CHECK(holders_.size() == quarantined_,
                 "the pinned pool goes away while memory is lent:\n{}", table());
  if (quarantined_ > 0) mapping_.abandon();
  const auto error = std::make_exception_ptr(Error(
      ErrorCode::kCancelled, "the pinned pool was closed while a request waited for host memory"));
  for (LeaseQueue::Entry* entry : waiters_.in_order())
    static_cast<Waiter*>(entry)->granted.fail(error);
}

/// Returns the regions that can serve a request: the general region and the reserve of its purpose,
/// each if it is large enough.
RegionSet PinnedPool::usable(const LeaseRequest& request) const {
  RegionSet regions = 0;
  for (std::size_t region = 0; region < regions_.size(); ++region) {
    const Region& where = regions_[region];
    const bool open_to_it = region == 0 || (where.purpose == request.purpose && !request.for_good);
    if (open_to_it && request.size_bytes <= where.arena.size_bytes())
      regions |= RegionSet{1} << region;
  }
  return regions;
}

void PinnedPool::check_possible(const LeaseRequest& request) const {
  if (request.size_bytes > 0 && usable(request) != 0) return;
  std::uint64_t longest = regions_[0].arena.size_bytes();
  for (const Region& region : regions_) {
    if (region.purpose == request.purpose) longest = std::max(longest, region.arena.size_bytes());
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "a request for {} of host memory for {} ({}) can never be served: the longest that "
          "fits a budget "
          "of {} with its reserves is {}. Give a larger host memory budget",
          format_bytes(request.size_bytes), to_string(request.purpose), request.holder,
          format_bytes(options_.budget_bytes), format_bytes(longest)));
}

/// Tries the reserve of the request's class first: no other class can use that, whereas other
/// requests may be waiting for the general region.
Lease PinnedPool::carve(const LeaseRequest& request, RegionSet regions) {
  for (std::size_t region = regions_.size(); region-- > 0;) {
    if ((regions >> region & 1) == 0) continue;
    if (Lease lease = carve_from(region, request)) return lease;
  }
  return {};
}

Lease PinnedPool::carve_from(std::size_t region, const LeaseRequest& request) {
  Region& from = regions_[region];
  std::uint64_t range = staggered_bytes(request.size_bytes, options_.alignment_bytes);
  auto offset = parts_.allocate(from.arena, from.base_offset_bytes, range, request.numa_node);
  if (!offset) {  // staggering only makes things faster: a lease that fits without it is not
                  // refused
    range = round_up(request.size_bytes, options_.alignment_bytes);
    offset = parts_.allocate(from.arena, from.base_offset_bytes, range, request.numa_node);
  }
  if (!offset) return {};
  std::byte* const data = mapping_.bytes().data() + from.base_offset_bytes + *offset;
  if (options_.absent != nullptr && request.decides)
    options_.absent->make_real({data, request.size_bytes});
  count_place(request, {from.base_offset_bytes + *offset, range});
  from.with_offers.take(*offset, range);
  account_.add(request.purpose, range);
  Lease lease;
  lease.pool_ = this;
  lease.data_ = data;
  lease.size_bytes_ = request.size_bytes;
  holders_.emplace(lease.data_, Holder{.serial = next_serial_++,
                                       .name = request.holder,
                                       .purpose = request.purpose,
                                       .size_bytes = request.size_bytes,
                                       .need = request.need,
                                       .region = region,
                                       .offset_bytes = *offset,
                                       .range_bytes = range,
                                       .offer = 0});
  return lease;
}

void PinnedPool::count_place(const LeaseRequest& request, FreeRange placed) {
  if (options_.metrics == nullptr || request.numa_node < 0 || parts_.empty()) return;
  const bool near = parts_.on_node(request.numa_node, placed);
  options_.metrics->add(near ? Counter::kLeasesOnNode : Counter::kLeasesElsewhere, 1);
}

PinnedPool::Holder& PinnedPool::holder_of(const Lease& lease) {
  const auto holder = holders_.find(lease.data_);
  ZIGGURAT_CHECK(holder != holders_.end(), "a lease that this pool did not lend");
  return holder->second;
}

Lease PinnedPool::try_acquire(const LeaseRequest& request) {
  if (request.size_bytes == 0) return {};
  const std::lock_guard lock(mutex_);
  return carve(request, usable(request) & ~waiters_.claims(request.need));
}

Task<Lease> PinnedPool::acquire(LeaseRequest request) {
  if (options_.cancel != nullptr) options_.cancel->check();
  check_possible(request);
  if (Lease lease = try_acquire(request)) co_return std::move(lease);
  Waiter waiter(*this, request);
  serve_waiters(/*whatever_need=*/false);
  co_await waiter.granted.wait();
  co_return std::move(waiter.lease);  // does not touch the pool any more, which may be gone
}

void PinnedPool::give_back(Lease& lease) noexcept {
  Reactor& reactor = reactor_;
  std::shared_ptr<Lifetime> somebody_waits;
  Offer ended;  // destroyed after the lock, because a callback may own anything
  {
    const std::lock_guard lock(mutex_);
    const Holder holder = holder_of(lease);
    if (holder.offer != 0) ended = end_offer(holder.offer);
    if (registration_ && registration_->quarantined(lease.bytes())) {
      holders_.at(lease.data_).name = "a lost device";
      ++quarantined_;
      return;
    }
    Region& region = regions_[holder.region];
    region.arena.free(holder.offset_bytes, holder.range_bytes);
    region.with_offers.free(holder.offset_bytes, holder.range_bytes);
    account_.subtract(holder.purpose, holder.range_bytes);
    holders_.erase(lease.data_);
    if (!waiters_.empty()) somebody_waits = lifetime_;
  }
  // From here on the pool may be gone: this was perhaps its last lease, on another thread.
  if (somebody_waits) post_serve(reactor, std::move(somebody_waits));
}

void PinnedPool::post_serve(Reactor& reactor, std::shared_ptr<Lifetime> lifetime) {
  reactor.post([lifetime = std::move(lifetime)] {
    const std::lock_guard alive(lifetime->mutex);
    if (lifetime->pool != nullptr) lifetime->pool->serve_waiters(/*whatever_need=*/false);
  });
}

bool PinnedPool::serve_from_free_memory() {
  bool served = false;
  RegionSet claimed = 0;
  while (LeaseQueue::Entry* entry = waiters_.soonest(claimed)) {
    Waiter& waiter = *static_cast<Waiter*>(entry);
    if (Lease lease = carve(waiter.request, waiter.regions & ~claimed)) {
      waiters_.erase(waiter);
      waiter.lease = std::move(lease);
      waiter.granted.set();  // resumes the waiter later, through the reactor's queue
      served = true;
    } else {
      claimed |= waiter.regions;
    }
  }
  return served;
}

bool PinnedPool::serve_waiters(bool whatever_need) {
  bool served = false;
  for (;;) {
    std::vector<Offer> taken;
    {
      const std::lock_guard lock(mutex_);
      served |= serve_from_free_memory();
      taken = plan_reclaim(whatever_need && !served);
    }
    if (taken.empty()) return served;
    for (const Offer& offer : taken)
      offer.give_back();  // not under the lock, because it drops the lease, and may do anything
                          // else
    const std::lock_guard lock(mutex_);
    for (const Offer& offer : taken) {
      const auto holder = holders_.find(offer.data);
      ZIGGURAT_CHECK(holder == holders_.end() || holder->second.serial != offer.serial,
                     "an offered lease was called back and not dropped");
    }
  }
}

/// Ends the offers that are needed to serve the soonest waiter that offers can serve, and returns
/// them. If all offers together would not be enough, ends none, so that no prefetch is thrown away
/// in vain.
std::vector<PinnedPool::Offer> PinnedPool::plan_reclaim(bool whatever_need) {
  if (offers_.empty()) return {};
  RegionSet claimed = 0;
  while (const LeaseQueue::Entry* entry = waiters_.soonest(claimed)) {
    const Waiter& waiter = *static_cast<const Waiter*>(entry);
    for (std::size_t region = 0; region < regions_.size(); ++region) {
      if (((waiter.regions & ~claimed) >> region & 1) == 0) continue;
      std::vector<Offer> taken;
      for (const ReclaimId id : enough_offers(waiter.request, regions_[region], whatever_need))
        taken.push_back(end_offer(id));
      if (!taken.empty()) return taken;
    }
    claimed |= waiter.regions;
  }
  return {};
}

/// Returns the offers of latest need that make `request` fit `region` if they are taken back. They
/// are returned to the region's arena one by one until it fits, and then taken out of it again.
std::vector<PinnedPool::ReclaimId> PinnedPool::enough_offers(const LeaseRequest& request,
                                                             Region& region, bool whatever_need) {
  if (region.with_offers.largest_free_bytes() < request.size_bytes) return {};
  std::vector<ReclaimId> ids;
  std::vector<const Holder*> tried;
  bool enough = false;
  for (const OfferOrder& offer : region.offers) {
    if (enough || !(whatever_need || request.need < offer.need)) break;
    ++offers_looked_at_;
    const Holder& holder = holders_.at(offers_.at(offer.id).data);
    region.arena.free(holder.offset_bytes, holder.range_bytes);
    tried.push_back(&holder);
    ids.push_back(offer.id);
    enough = region.arena.largest_free_bytes() >= request.size_bytes;
  }
  for (const Holder* holder : tried) region.arena.take(holder->offset_bytes, holder->range_bytes);
  if (!enough) ids.clear();
  return ids;
}

PinnedPool::ReclaimId PinnedPool::offer(const Lease& lease, Need need,
                                        std::function<void()> give_back) {
  std::shared_ptr<Lifetime> somebody_waits;
  ReclaimId id = 0;
  {
    const std::lock_guard lock(mutex_);
    Holder& holder = holder_of(lease);
    ZIGGURAT_CHECK(holder.offer == 0, "a lease is offered twice");
    id = holder.offer = next_reclaim_++;
    Region& region = regions_[holder.region];
    region.offers.insert({need, id});
    region.with_offers.free(holder.offset_bytes, holder.range_bytes);
    offers_.emplace(id, Offer{holder.serial, lease.data_, need, std::move(give_back)});
    if (!waiters_.empty()) somebody_waits = lifetime_;
  }
  if (somebody_waits) post_serve(reactor_, std::move(somebody_waits));
  return id;
}

PinnedPool::Offer PinnedPool::end_offer(ReclaimId id) {
  const auto found = offers_.find(id);
  Offer offer = std::move(found->second);
  offers_.erase(found);
  Holder& holder = holders_.at(offer.data);
  holder.offer = 0;
  Region& region = regions_[holder.region];
  region.offers.erase({offer.need, id});
  region.with_offers.take(holder.offset_bytes, holder.range_bytes);
  return offer;
}

void PinnedPool::withdraw(ReclaimId id) {
  Offer ended;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  if (!offers_.contains(id)) return;  // it was called back, or ended with its lease
  ended = end_offer(id);
}

void PinnedPool::fail_waiters() {
  if (waiting() == 0) return;
  // A prefetch that guessed wrong may hold the memory that a real demand waits for. It is better to
  // read it again later than to give up.
  if (serve_waiters(/*whatever_need=*/true)) return;
  const std::string text =
      fmt::format("host memory is locked up: nothing is in flight, but {} requests wait for it\n{}",
                  waiting(), holder_table());
  const Account held = account();
  const auto error = std::make_exception_ptr(MemoryExhausted({.budget = MemoryBudget::kHost,
                                                              .had_bytes = held.capacity_bytes(),
                                                              .needed_bytes = held.used_bytes()},
                                                             text));
  std::vector<LeaseQueue::Entry*> waiters;
  {
    const std::lock_guard lock(mutex_);
    waiters = waiters_.in_order();
    for (LeaseQueue::Entry* entry : waiters) waiters_.erase(*entry);
  }
  for (LeaseQueue::Entry* entry : waiters) static_cast<Waiter*>(entry)->granted.fail(error);
}

Account PinnedPool::account() const {
  const std::lock_guard lock(mutex_);
  return account_;
}

std::uint64_t PinnedPool::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return account_.capacity_bytes() - account_.used_bytes();
}

std::size_t PinnedPool::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiters_.size();
}

std::uint64_t PinnedPool::looked_at() const {
  const std::lock_guard lock(mutex_);
  return waiters_.looked_at() + offers_looked_at_;
}

std::string PinnedPool::holder_table() const {
  const std::lock_guard lock(mutex_);
  return table();
}

std::string PinnedPool::table() const {
  const auto line = [](const char* verb, Purpose purpose, std::uint64_t size, const Need& need,
                       const char* who) {
    return fmt::format("  {} {:>10} {:<12} generation {} position {}: {}\n", verb,
                       format_bytes(size), to_string(purpose), need.generation, need.position, who);
  };
  std::string text = fmt::format("  account: {}\n", account_.text());
  for (const Region& region : regions_) {
    text += fmt::format(
        "  {}: {} of {} free, longest {}\n",
        &region == regions_.data() ? std::string("general")
                                   : fmt::format("reserve of {}", to_string(region.purpose)),
        format_bytes(region.arena.free_bytes()), format_bytes(region.arena.size_bytes()),
        format_bytes(region.arena.largest_free_bytes()));
  }
  std::vector<const Holder*> holders;
  for (const auto& [data, holder] : holders_) holders.push_back(&holder);
  std::ranges::sort(holders, {}, &Holder::serial);
  for (const Holder* h : holders)
    text += line("holds", h->purpose, h->size_bytes, h->need, h->name);
  for (const LeaseQueue::Entry* entry : waiters_.in_order()) {
    const LeaseRequest& request = static_cast<const Waiter*>(entry)->request;
    text += line("waits", request.purpose, request.size_bytes, request.need, request.holder);
  }
  return text;
}

}  // namespace ziggurat
