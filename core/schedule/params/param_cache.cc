// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/param_cache.cc: which parameters are on the device, and how they get there.
#include "core/schedule/params/param_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kSurprisesMax =
    4;  // acquires out of order in one step after which the order is learned again

}  // namespace

ParamCache::ParamCache(Context& context, UnitParamHome& home, ParamCacheLimits limits)
    : context_(context), home_(home), limits_(limits), memory_returned_(context.cancel) {
  for (UnitId u = 0; u < context.table.unit_count(); ++u) slots_.emplace_back(context.cancel);
  for (Slot& slot : slots_) slot.settled.set();
  // Memory can come back on any thread, and stall handlers outlive this cache. So both callbacks
  // check on the reactor's thread whether the cache still lives.
  const std::weak_ptr<bool> alive = alive_;
  context.device.on_free([this, alive, &reactor = context.reactor] {
    reactor.post([this, alive] {
      if (!alive.expired()) memory_returned();
    });
  });
  context.reactor.on_stall([this, alive] {
    if (alive.expired() || memory_waiters_ == 0) return;
    memory_returned_.fail(
        std::make_exception_ptr(exhausted(0, "nothing on the device can be freed")));
  });
}

/// Makes the error for `size_bytes` that do not fit on the device.
MemoryExhausted ParamCache::exhausted(std::uint64_t size_bytes, const std::string& why) const {
  const Account account = context_.device.account();
  return MemoryExhausted(
      {.budget = MemoryBudget::kDevice,
       .had_bytes = account.capacity_bytes(),
       .needed_bytes = account.used_bytes() + size_bytes},
      fmt::format("`device_memory` is too small: {}; the device holds {}", why, account.text()));
}

ParamCache::~ParamCache() { context_.device.on_free({}); }

Task<ParamCache::Acquired> ParamCache::acquire(UnitId unit) {
  context_.cancel.check();
  ZIGGURAT_CHECK(unit < slots_.size(), "unit {} of {}", unit, slots_.size());
  Slot& slot = slots_[unit];
  const DType dtype = context_.table.dtype(unit);
  const std::uint64_t unpadded_bytes = context_.table.unit(unit).count * size_bytes(dtype);
  learn(unit);
  if (gather_) {
    Task<Acquired> gathered = acquire_gathered(unit);
    co_return co_await std::move(gathered);
  }
  if (home_.used_at_home()) {
    co_await context_.gates.wait(unit);
    ++slot.pins;
    const TypedDeviceSpan<const std::byte> params{dtype, home_.view(unit).first(unpadded_bytes)};
    co_return Acquired{.params = params, .landed = {}};
  }
  const bool present =
      slot.state == State::kPresent && slot.generation == generation_ && slot.landed.happened();
  context_.metrics.add(present ? Counter::kPrefetchHits : Counter::kPrefetchMisses, 1);
  while (slot.state != State::kPresent || slot.generation != generation_) {
    co_await context_.gates.wait(unit);
    const CountedTime waited(context_.metrics, Counter::kWaitParamsNs);
    if (slot.state == State::kLoading) {
      home_.hurry(unit);
      co_await slot.settled.wait();
    } else {
      co_await load(unit, /*on_demand=*/true);
    }
  }
  ++slot.pins;
  prefetch();
  const DeviceSpan<const std::byte> bytes = device_span(slot.buffer).first(unpadded_bytes);
  co_return Acquired{.params = {dtype, bytes}, .landed = slot.landed};
}

Task<ParamCache::Acquired> ParamCache::acquire_gathered(UnitId unit) {
  Slot& slot = slots_[unit];
  const bool decided = slot.state == State::kPresent && slot.generation == generation_;
  if (!decided && !start_gather(unit, 0)) {
    const std::uint64_t size_bytes = context_.table.unit_param_bytes(unit);
    throw exhausted(size_bytes, fmt::format("unit {} ({}) does not fit beside the units in use",
                                            unit, format_bytes(size_bytes)));
  }
  ++slot.pins;
  prefetch();
  const std::shared_ptr<UnitGather::Flight> flight = slot.flight;
  context_.metrics.add(flight->done.is_set() ? Counter::kPrefetchHits : Counter::kPrefetchMisses,
                       1);
  co_await context_.gates.wait(unit);
  if (!flight->done.is_set()) {
    const CountedTime waited(context_.metrics, Counter::kWaitRanksNs);
    gather_->hurry(*flight);
    co_await flight->done.wait();
  } else {
    co_await flight->done.wait();  // rethrows a failure
  }
  const DType dtype = context_.table.dtype();
  const std::uint64_t unpadded_bytes = context_.table.unit(unit).count * size_bytes(dtype);
  const auto memory = reinterpret_cast<std::uintptr_t>(flight->memory);
  co_return Acquired{.params = {dtype, {memory, unpadded_bytes}}, .landed = {}};
}

/// Decides that `unit` is gathered next. To make room it may drop units whose next use is farther
/// than `nearer_than`. Returns false if there is still no room.
bool ParamCache::start_gather(UnitId unit, std::uint64_t nearer_than) {
  Slot& slot = slots_[unit];
  ZIGGURAT_CHECK(slot.pins == 0, "unit {} is stale while in use", unit);
  drop(slot);
  const Need need{.generation = generation_, .position = 0};
  do {
    slot.flight = gather_->start(unit, need, context_.gates.gate(unit));
  } while (!slot.flight && drop_farthest(nearer_than));
  if (!slot.flight) return false;
  slot.generation = generation_;
  slot.state = State::kPresent;
  return true;
}

void ParamCache::release(UnitId unit, const Event& read) {
  Slot& slot = slots_[unit];
  ZIGGURAT_CHECK(slot.pins > 0, "unit {} is released more often than acquired", unit);
  std::erase_if(slot.readers, [](const Event& other) { return other.happened(); });
  if (!read.happened()) {
    if (slot.buffer) slot.buffer.used_until(read);
    if (slot.flight) gather_->used_until(*slot.flight, read);
    if (home_.used_at_home()) slot.readers.push_back(read);
  }
  if (--slot.pins > 0 || home_.used_at_home()) return;
  if (!persists(unit) && next_use(unit) > limits_.max_reuse_distance) drop(slot);
  prefetch();
  memory_returned();  // somebody may wait for memory, and an unpinned unit can be dropped
}

Task<> ParamCache::readers_done(UnitId unit) {
  const std::vector<Event> readers = slots_[unit].readers;
  const Event landed = slots_[unit].landed;  // the last copy to the device reads the home too
  for (const Event& read : readers) co_await read.wait();
  co_await landed.wait();
}

/// Loads a unit; returns when the copy is queued. Then land() waits for the copy.
Task<> ParamCache::load(UnitId unit, bool on_demand) {
  Slot& slot = slots_[unit];
  ZIGGURAT_CHECK(slot.pins == 0, "unit {} is stale while in use", unit);
  drop(slot);
  slot.state = State::kLoading;
  slot.settled.reset();
  const std::uint64_t generation = generation_;
  std::exception_ptr error;
  try {
    co_await context_.gates.gate(unit).wait();
    const std::uint64_t size_bytes = context_.table.unit_param_bytes(unit);
    DeviceBuffer buffer;
    if (on_demand) {
      buffer = co_await allocate(size_bytes, Purpose::kParams);
    } else {
      buffer = allocate_now(size_bytes, Purpose::kParams, next_use(unit));
    }
    if (buffer && generation == generation_) {
      UnitParamHome::Loading loading =
          co_await home_.load(unit, buffer.data(), Need{.generation = generation_, .position = 0},
                              on_demand ? IoPriority::kDemand : IoPriority::kPrefetch);
      slot.buffer = std::move(buffer);
      slot.landed = loading.landed;
      context_.spawn(land(unit, std::move(loading)));
    }
  } catch (...) {
    error = std::current_exception();
  }
  // If another generation has begun meanwhile, the loaded parameters are stale, and acquire() loads
  // the unit again.
  const bool good = slot.buffer && generation == generation_;
  if (!good) slot.buffer = {};
  slot.generation = generation;
  slot.state = good ? State::kPresent : State::kAbsent;
  slot.settled.set();
  // Somebody may wait for memory, and a unit that was only prefetched can be dropped.
  memory_returned();
  if (error) std::rethrow_exception(error);
}

/// Waits for a copy to end. A failed copy must end the run, because streams that wait for it go on
/// without its bytes.
Task<> ParamCache::land(UnitId unit, UnitParamHome::Loading loading) {
  try {
    co_await loading.landed.wait();
  } catch (const Error& error) {
    throw Error(error.code(),
                fmt::format("the parameters of unit {} ('{}', {}) did not reach the device: {}",
                            unit, context_.table.model().units[unit].name,
                            format_bytes(context_.table.unit_param_bytes(unit)), error.what()),
                error.native());
  }
}

Task<DeviceBuffer> ParamCache::allocate(std::uint64_t size_bytes, Purpose purpose) {
  for (;;) {
    memory_returned_.reset();
    DeviceBuffer buffer = allocate_now(size_bytes, purpose, 0);
    if (buffer) co_return buffer;
    if (size_bytes > context_.device.account().capacity_bytes()) {
      throw exhausted(size_bytes, fmt::format("{} of {} cannot fit even if all else is dropped",
                                              format_bytes(size_bytes), to_string(purpose)));
    }
    ++memory_waiters_;
    std::exception_ptr error;
    try {
      co_await memory_returned_.wait();
    } catch (...) {
      error = std::current_exception();
    }
    --memory_waiters_;
    if (error) std::rethrow_exception(error);
  }
}

/// Tries to allocate. Drops unpinned parameters whose next use is farther than `nearer_than`, those
/// with the farthest first.
DeviceBuffer ParamCache::allocate_now(std::uint64_t size_bytes, Purpose purpose,
                                      std::uint64_t nearer_than) {
  for (;;) {
    DeviceBuffer buffer = context_.device.try_allocate(size_bytes, purpose);
    if (buffer) return buffer;
    if (gather_ || !drop_farthest(nearer_than)) return {};
  }
}

bool ParamCache::drop_farthest(std::uint64_t nearer_than) {
  Slot* victim = nullptr;
  std::uint64_t farthest = nearer_than;
  for (UnitId u = 0; u < slots_.size(); ++u) {
    Slot& slot = slots_[u];
    if (slot.state != State::kPresent || slot.pins > 0 || persists(u)) continue;
    const std::uint64_t distance = slot.generation == generation_ ? next_use(u) : kNever;
    if (distance > farthest) {
      victim = &slot;
      farthest = distance;
    }
  }
  if (victim == nullptr) return false;
  drop(*victim);
  return true;
}

void ParamCache::drop(Slot& slot) {
  if (slot.state != State::kPresent) return;
  slot.state = State::kAbsent;
  slot.buffer = {};
  if (slot.flight) gather_->free(slot.flight);
  slot.flight = {};
}

void ParamCache::memory_returned() { memory_returned_.set(); }

void ParamCache::learn(UnitId unit) {
  if (learning_) {
    order_.push_back(unit);
    position_ = order_.size();
    return;
  }
  // The unit is out of order (in an evaluation, or because the trainer branches): the position
  // moves to the unit's next place in the learned order.
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const std::size_t at = (position_ + k) % order_.size();
    if (order_[at] != unit) continue;
    if (k > 0) ++surprises_;
    position_ = at + 1;
    return;
  }
  ++surprises_;
}

/// Returns how many elements of other units are used before `unit` is used again in this step, by
/// the learned order; kNever if it is not used again.
std::uint64_t ParamCache::next_use(UnitId unit) const {
  std::uint64_t distance = 1;
  for (std::size_t i = position_; i < order_.size(); ++i) {
    if (order_[i] == unit) return distance;
    distance += context_.table.unit(order_[i]).count;
  }
  return kNever;
}

/// Whether a unit stays on the device because it is small: dropping it would free less than it
/// costs to load it again.
bool ParamCache::persists(UnitId unit) const {
  return context_.table.unit(unit).count <= limits_.param_persistence_threshold &&
         slots_[unit].generation == generation_;
}

std::uint64_t ParamCache::live_count() const {
  std::uint64_t count = 0;
  for (UnitId u = 0; u < slots_.size(); ++u) {
    if (slots_[u].state != State::kAbsent && !persists(u)) count += context_.table.unit(u).count;
  }
  return count;
}

void ParamCache::prefetch() {
  if (learning_ || home_.used_at_home() || context_.cancel.cancelled()) return;
  const std::size_t end = std::min(order_.size(), position_ + limits_.prefetch_units_max);
  std::uint64_t ahead = 0;
  for (std::size_t i = position_; i < end; ++i) {
    const UnitId unit = order_[i];
    const Slot& slot = slots_[unit];
    ahead += context_.table.unit(unit).count;
    if (ahead > limits_.prefetch_elements_max) return;
    if (slot.state == State::kLoading || slot.pins > 0 || slot.may_change) continue;
    if (slot.state == State::kPresent && slot.generation == generation_) continue;
    if (live_count() + context_.table.unit(unit).count > limits_.max_live_parameters) return;
    if (!gather_) {
      context_.spawn(load(unit, /*on_demand=*/false));
    } else if (!start_gather(unit, next_use(unit))) {
      return;
    }
  }
}

Task<> ParamCache::quiesce() {
  if (gather_) co_await gather_->idle();
  for (Slot& slot : slots_) {
    if (slot.state == State::kLoading) co_await slot.settled.wait();
    const Event landed = slot.landed;
    co_await landed.wait();
  }
}

void ParamCache::begin_generation(std::uint64_t generation) {
  generation_ = generation;
  if (surprises_ > kSurprisesMax) order_.clear();
  learning_ = order_.empty();
  surprises_ = 0;
  position_ = 0;
  for (Slot& slot : slots_) {
    if (slot.pins == 0) drop(slot);
    slot.may_change = false;
  }
  prefetch();
}

}  // namespace ziggurat
