// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/residency.h: whether a unit's parameters are on the device, and who gives
// way. It serves acquire and release.
//
// There are three policies, and make_residency.cc chooses among them. Units that live on the device
// are used at home (at_home.h). Other units are loaded: in a learned order ahead of the trainer,
// and dropped when the device is full (loaded.h). In stage 3 they are gathered from all ranks
// (gathered.h). All device memory that is needed during a step is taken through allocate(), so that
// accumulators and gradients can drive out clean parameters too. Reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "core/schedule/context.h"
#include "core/schedule/homes/param_home.h"
#include "core/schedule/params/brought_units.h"
#include "core/schedule/params/device_room.h"
#include "core/schedule/params/unit_gather.h"

namespace ziggurat {

struct ResidencyLimits {
  std::uint64_t max_live_parameters;  ///< elements on the device up to which prefetch may load
  /// A released unit is kept if it is used again before this many elements of other units are used.
  std::uint64_t max_reuse_distance;
  /// Units with at most this many elements are kept for the whole step and are not counted.
  std::uint64_t param_persistence_threshold = 0;
  /// The most elements that are loaded ahead of the trainer.
  std::uint64_t prefetch_elements_max = std::numeric_limits<std::uint64_t>::max();
  /// The most units that are loaded ahead of the trainer (core/plan/prefetch_depth.h).
  std::size_t prefetch_units_max = 2;
};

class Residency {
 public:
  /// Chooses the policy: gathers units through `gather` if there is one, uses them at home if the
  /// home allows it, and else loads them.
  static std::unique_ptr<Residency> create(Context& context, UnitParamHome& home,
                                           const ResidencyLimits& limits,
                                           std::unique_ptr<UnitGather> gather);
  /// Loads units that are not those of the table.
  static std::unique_ptr<Residency> create(Context& context, std::unique_ptr<BroughtUnits> units,
                                           const ResidencyLimits& limits);
  virtual ~Residency() = default;
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  struct Acquired {
    DeviceSpan<const std::byte> params;  ///< without padding
    Event landed;  ///< happens when the parameters are on the device; readers wait for it
  };
  /// Whether acquire() waits for memory of the device, or throws MemoryExhausted if there is none
  /// that is free or may be freed.
  enum class Room : std::uint8_t { kWaitedFor, kThereNow };
  /// Waits until the last copy of `unit` at the current generation to the device is queued. Pins
  /// the unit.
  virtual Task<Acquired> acquire(UnitId unit, Room room) = 0;
  /// Learns that the trainer uses `unit` now.
  virtual void used(UnitId) {}
  /// Waits until memory of the device may have come back. Errors: MemoryExhausted if none can.
  Task<> room_returned() { return room_.wait(); }
  /// Lets those who wait for memory look again.
  void look_again() { room_.returned(); }
  /// Unpins the unit; its reader has finished when `read` happens.
  virtual void release(UnitId unit, const Event& read) = 0;
  /// Waits until nobody reads `unit`'s parameters at home any more, so that they may be
  /// overwritten.
  virtual Task<> readers_done(UnitId unit) = 0;

  /// Allocates device memory for something else. Drops clean parameters if the policy may, and
  /// waits if it must. Errors: kResourceExhausted with the device's account if no memory can come
  /// back.
  Task<DeviceBuffer> allocate(std::uint64_t size_bytes, Purpose purpose) {
    return room_.allocate(size_bytes, purpose, [this] { return make_room(); });
  }

  /// Lets those who wait for memory go on waiting at a lock-up while `may_come_back` says that
  /// another thread of the trainer may still release a unit.
  void wait_while(std::function<bool()> may_come_back) {
    room_.wait_while(std::move(may_come_back));
  }
  /// Drops all units that nobody uses, and brings none ahead before brings_ahead() says so again:
  /// then what is allocated in a row lies together, and memory is not lost between it.
  virtual Task<> clear() { co_return; }
  virtual void brings_ahead() {}
  /// Waits until the unit is not being loaded, and drops it unless somebody uses it. Returns
  /// whether it is gone.
  virtual Task<bool> drop_unused(UnitId) { co_return false; }
  /// Brings `units` ahead of the trainer, which will use them next in this order, as far as there
  /// is room for them.
  virtual void expect(std::span<const UnitId>) {}
  /// Notes that `unit`'s gradient of this step is complete. Until the next begin_generation() its
  /// parameters may change at home, so they are neither acquired nor loaded ahead.
  virtual void params_may_change(UnitId) noexcept {}
  /// Waits until nothing is being loaded, so that parameters may change at home.
  virtual Task<> quiesce() { co_return; }
  /// Makes acquire() give the parameters of `generation` from now on. The gates have begun the
  /// generation already.
  virtual void begin_generation(std::uint64_t) {}
  /// Returns a hash of what this rank gathered since the last call (UnitGather); 0 if nothing is
  /// gathered.
  virtual std::uint64_t take_order() noexcept { return 0; }

 protected:
  explicit Residency(Context& context) : context_(context), room_(context) {}
  /// Frees memory of the device. Returns false if nothing may be freed.
  virtual bool make_room() { return false; }

  Context& context_;
  DeviceRoom room_;
};

}  // namespace ziggurat
