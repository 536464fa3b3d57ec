// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/param_cache.h: which units' parameters are on the device: acquire and
// release, prefetch in learned order, and whom to drop when the device is full.
//
// The order of units is learned in the first step and is a hint ever after: a unit used out of
// order is loaded on demand. Victims are those whose next use is farthest (Belady's rule, on the
// learned order). All device memory that appears during a step is had through allocate(), so
// accumulators and gradients drive out clean parameters too.
//
// In stage 3 a load is a gather, in which every rank takes part. So what is loaded and dropped, and
// in which order, is decided from the trainer's calls, the learned order and sizes only, at the
// instant of a call and never on what time made of it; and in memory set aside (unit_gather.h), so
// that no accumulator drives parameters out on one rank and not on another. A decided unit counts
// as present; acquire() waits until it is.
//
// A loaded unit is present once its copy is queued: who reads it waits for the copy's event, on its
// stream or on the host. Memory of a unit that is dropped carries the events of its readers, and
// its next writer waits for them. Reactor's thread only.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/memory_exhausted.h"
#include "core/schedule/context.h"
#include "core/schedule/homes.h"
#include "core/schedule/params/unit_gather.h"

namespace ziggurat {

struct ParamCacheLimits {
  std::uint64_t max_live_parameters;  ///< elements on the device that prefetch may reach
  /// Elements of other units' use within which a released unit is kept
  std::uint64_t max_reuse_distance;
  /// Units of at most so many elements are not given back within a step, and are not counted
  std::uint64_t param_persistence_threshold = 0;
  /// Elements ahead of the trainer
  std::uint64_t prefetch_elements_max = std::numeric_limits<std::uint64_t>::max();
  std::size_t prefetch_units_max = 2;  ///< units ahead of the trainer
};

class ParamCache {
 public:
  ParamCache(Context& context, ParamHome& home, ParamCacheLimits limits);
  ~ParamCache();
  /// Stage 3, before the first acquire().
  void gather_through(std::unique_ptr<UnitGather> gather) { gather_ = std::move(gather); }
  ParamCache(const ParamCache&) = delete;
  ParamCache& operator=(const ParamCache&) = delete;

  struct Acquired {
    TypedDeviceSpan<const std::byte> params;
    Event landed;  ///< they are there; readers wait for it
  };
  /// Waits until the last hop of `unit` to the device, at the current generation, is queued, and
  /// pins the unit.
  Task<Acquired> acquire(UnitId unit);
  /// The reader has finished with it when `read` happens.
  void release(UnitId unit, const Event& read);
  /// Waits until nobody reads `unit`'s parameters at home any more: they may be overwritten there.
  Task<> readers_done(UnitId unit);

  /// Waits until `unit` stands at the current generation at home.
  Task<> wait_updated(UnitId unit);
  /// Device memory for something else; drops clean parameters, farthest next use first, and waits
  /// if it must. Errors: kResourceExhausted with the device's account when nothing can come back.
  Task<DeviceBuffer> allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Device memory came back: whoever waits in allocate() tries again.
  void memory_returned();

  /// `unit`'s gradient of this step is complete: until the next begin_generation() its parameters
  /// may change at home, and are neither acquired nor loaded ahead.
  void params_may_change(UnitId unit) noexcept { slots_[unit].may_change = true; }
  /// Waits until nothing is being loaded: parameters may then change at home.
  Task<> quiesce();
  /// The parameters of `generation` are what acquire() gives from now on; what is cached is stale
  /// unless it already is.
  void begin_generation(std::uint64_t generation);
  /// All chunks of `unit` stand at `generation` at home.
  void unit_updated(UnitId unit, std::uint64_t generation);
  /// What this rank gathered since the last call (UnitGather); 0 where nothing is.
  std::uint64_t take_order() noexcept { return gather_ ? gather_->take_order() : 0; }

 private:
  /// kPresent: its copy is at least queued.
  enum class State : std::uint8_t { kAbsent, kLoading, kPresent };
  struct Slot {
    explicit Slot(CancelScope& cancel) : settled(cancel), updated(cancel) {}
    State state = State::kAbsent;
    DeviceBuffer buffer;
    Event landed;                                // the last copy from home
    std::shared_ptr<UnitGather::Flight> flight;  // in place of the buffer, where units are gathered
    std::vector<Event> readers;                  // of what is used at home
    std::uint64_t generation = 0;                // of the contents
    std::size_t pins = 0;
    bool may_change = false;  // at home
    Signal settled;           // not kLoading
    std::uint64_t home_generation = 0;
    Signal updated;  // home_generation == generation_
  };

  Task<Acquired> acquire_gathered(UnitId unit);
  bool start_gather(UnitId unit, std::uint64_t nearer_than);
  Task<> load(UnitId unit, bool on_demand);
  Task<> land(UnitId unit, ParamHome::Loading loading);
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
  ParamHome& home_;
  ParamCacheLimits limits_;
  std::unique_ptr<UnitGather> gather_;
  std::vector<Slot> slots_;
  std::uint64_t generation_ = 0;

  std::vector<UnitId> order_;  // of acquires in a step, learned
  std::size_t position_ = 0;   // next expected acquire
  bool learning_ = true;
  std::size_t surprises_ = 0;  // acquires out of the learned order in this step

  Signal memory_returned_;
  std::size_t memory_waiters_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ziggurat
