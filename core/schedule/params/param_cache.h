// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/param_cache.h: decides which units' parameters are on the device. It serves
// acquire and release, prefetches in a learned order, and drops units when the device is full.
//
// The order of units is learned in the first step and is only a hint afterwards: a unit that is
// used out of order is loaded on demand. When the device is full, the unit whose next use is
// farthest is dropped (Belady's rule, on the learned order). All device memory that is needed
// during a step is taken through allocate(), so accumulators and gradients can drive out clean
// parameters too.
//
// In stage 3 a load is a gather, in which every rank takes part, so all ranks must decide alike.
// What is loaded and dropped, and in which order, therefore depends only on the trainer's calls,
// the learned order and sizes. It is decided at the instant of a call and never depends on timing.
// Gathered units have memory of their own (unit_gather.h), so that no accumulator can drive
// parameters out on one rank and not on another. A unit counts as present as soon as its gather is
// decided; acquire() waits until it has landed.
//
// A loaded unit is present once its copy is queued. Its readers wait for the copy's event, on their
// stream or on the host. The memory of a dropped unit carries the events of its readers, and its
// next writer waits for them. Reactor's thread only.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/memory_exhausted.h"
#include "core/schedule/context.h"
#include "core/schedule/homes/param_home.h"
#include "core/schedule/params/unit_gather.h"

namespace ziggurat {

struct ParamCacheLimits {
  std::uint64_t max_live_parameters;  ///< elements on the device up to which prefetch may load
  /// A released unit is kept if it is used again before this many elements of other units are used.
  std::uint64_t max_reuse_distance;
  /// Units with at most this many elements are kept for the whole step and are not counted.
  std::uint64_t param_persistence_threshold = 0;
  /// The most elements that are loaded ahead of the trainer.
  std::uint64_t prefetch_elements_max = std::numeric_limits<std::uint64_t>::max();
  std::size_t prefetch_units_max = 2;  ///< most units loaded ahead of the trainer
};

class ParamCache {
 public:
  ParamCache(Context& context, UnitParamHome& home, ParamCacheLimits limits);
  ~ParamCache();
  /// Gathers units through `gather`. In stage 3 this is called before the first acquire().
  void gather_through(std::unique_ptr<UnitGather> gather) { gather_ = std::move(gather); }
  ParamCache(const ParamCache&) = delete;
  ParamCache& operator=(const ParamCache&) = delete;

  struct Acquired {
    TypedDeviceSpan<const std::byte> params;
    Event landed;  ///< happens when the parameters are on the device; readers wait for it
  };
  /// Waits until the last copy of `unit` at the current generation to the device is queued. Pins
  /// the unit.
  Task<Acquired> acquire(UnitId unit);
  /// Unpins the unit; its reader has finished when `read` happens.
  void release(UnitId unit, const Event& read);
  /// Waits until nobody reads `unit`'s parameters at home any more, so that they may be
  /// overwritten.
  Task<> readers_done(UnitId unit);

  /// Allocates device memory for something else. Drops clean parameters, those with the farthest
  /// next use first, and waits if it must. Errors: kResourceExhausted with the device's account if
  /// no memory can come back.
  Task<DeviceBuffer> allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Notes that device memory came back: calls that wait in allocate() try again.
  void memory_returned();

  /// Notes that `unit`'s gradient of this step is complete. Until the next begin_generation() its
  /// parameters may change at home, so they are neither acquired nor loaded ahead.
  void params_may_change(UnitId unit) noexcept { slots_[unit].may_change = true; }
  /// Waits until nothing is being loaded, so that parameters may change at home.
  Task<> quiesce();
  /// Makes acquire() give the parameters of `generation` from now on. Cached parameters of another
  /// generation become stale. The gates have begun the generation already.
  void begin_generation(std::uint64_t generation);
  /// Returns a hash of what this rank gathered since the last call (UnitGather); 0 if nothing is
  /// gathered.
  std::uint64_t take_order() noexcept { return gather_ ? gather_->take_order() : 0; }

 private:
  /// kPresent means that the unit's copy is at least queued.
  enum class State : std::uint8_t { kAbsent, kLoading, kPresent };
  struct Slot {
    explicit Slot(CancelScope& cancel) : settled(cancel) {}
    State state = State::kAbsent;
    DeviceBuffer buffer;
    Event landed;  // when the last copy from home has ended
    // Used instead of the buffer, where units are gathered.
    std::shared_ptr<UnitGather::Flight> flight;
    std::vector<Event> readers;    // readers of a unit that is used at home
    std::uint64_t generation = 0;  // generation of the buffer's parameters
    std::size_t pins = 0;
    bool may_change = false;  // parameters may change at home
    Signal settled;           // set while the state is not kLoading
  };

  Task<Acquired> acquire_gathered(UnitId unit);
  bool start_gather(UnitId unit, std::uint64_t nearer_than);
  Task<> load(UnitId unit, bool on_demand);
  Task<> land(UnitId unit, UnitParamHome::Loading loading);
  DeviceBuffer allocate_now(std::uint64_t size_bytes, Purpose purpose, std::uint64_t nearer_than);
  bool drop_farthest(std::uint64_t nearer_than);
  void drop(Slot& slot);
  MemoryExhausted exhausted(std::uint64_t size_bytes, const std::string& why) const;
  void learn(UnitId unit);
  void prefetch();
  std::uint64_t next_use(UnitId unit) const;
  bool persists(UnitId unit) const;
  std::uint64_t live_count() const;

  Context& context_;
  UnitParamHome& home_;
  ParamCacheLimits limits_;
  std::unique_ptr<UnitGather> gather_;
  std::vector<Slot> slots_;
  std::uint64_t generation_ = 0;

  std::vector<UnitId> order_;  // learned order of the acquires in a step
  std::size_t position_ = 0;   // the next expected acquire in order_
  bool learning_ = true;
  std::size_t surprises_ = 0;  // acquires in this step that were not in the learned order

  Signal memory_returned_;
  std::size_t memory_waiters_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ziggurat
