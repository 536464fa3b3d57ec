// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/loaded.h: units that are copied from their home to the device. For
// make_residency.cc.
//
// A loaded unit is present once its copy is queued. Its readers wait for the copy's event, on their
// stream or on the host. The memory of a dropped unit carries the events of its readers, and its
// next writer waits for them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "core/schedule/params/brought.h"

namespace ziggurat {

class LoadedResidency final : public Brought {
 public:
  LoadedResidency(Context& context, std::unique_ptr<BroughtUnits> units,
                  const ResidencyLimits& limits)
      : Brought(context, std::move(units), limits) {
    for (UnitId u = 0; u < slots_.size(); ++u) copies_.emplace_back(context.cancel);
    for (Copy& copy : copies_) copy.settled.set();
  }

  Task<Acquired> acquire(UnitId unit, Room room) override {
    context_.cancel.check();
    ZIGGURAT_CHECK(unit < slots_.size(), "unit {} of {}", unit, slots_.size());
    Slot& slot = slots_[unit];
    Copy& copy = copies_[unit];
    if (room == Room::kWaitedFor) order_.used(unit);
    const bool present = is_there(unit) && copy.landed.happened();
    context_.metrics.add(present ? Counter::kPrefetchHits : Counter::kPrefetchMisses, 1);
    while (!is_there(unit)) {
      co_await units_->at_home(unit, true);
      if (is_there(unit)) break;  // another waited too, and has loaded it
      const CountedTime waited(context_.reactor.clock(), context_.metrics, Counter::kWaitParamsNs);
      if (slot.state == State::kComing) {
        units_->hurry(unit);
        co_await copy.settled.wait();
      } else {
        begin(unit);
        co_await load(unit, room == Room::kWaitedFor ? Why::kAwaited : Why::kDemanded);
      }
    }
    ++slot.pins;
    prefetch();
    co_return Acquired{.params = device_span(copy.buffer).first(units_->used_bytes(unit)),
                       .landed = copy.landed};
  }
  Task<> readers_done(UnitId unit) override {
    const Event landed = copies_[unit].landed;  // the last copy to the device reads the home
    co_await landed.wait();
  }
  Task<> quiesce() override {
    for (UnitId u = 0; u < slots_.size(); ++u) {
      if (slots_[u].state == State::kComing) co_await copies_[u].settled.wait();
      const Event landed = copies_[u].landed;
      co_await landed.wait();
    }
  }
  Task<bool> drop_unused(UnitId unit) override {
    while (slots_[unit].state == State::kComing) {
      units_->hurry(unit);
      co_await copies_[unit].settled.wait();
    }
    if (slots_[unit].pins > 0) co_return false;
    drop(unit);
    co_return true;
  }

 private:
  struct Copy {
    explicit Copy(CancelScope& cancel) : settled(cancel) {}
    DeviceBuffer buffer;
    Event landed;    // when the last copy from home has ended
    Signal settled;  // set while the unit is not coming
  };
  /// Why a unit is loaded: a trainer needs it, and waits for memory or not; or it will need it.
  enum class Why : std::uint8_t { kAwaited, kDemanded, kAhead };

  bool make_room() override { return drop_farthest(0); }
  bool bring_ahead(UnitId unit) override {
    begin(unit);
    context_.spawn_local(load(unit, Why::kAhead));
    return true;
  }
  void free(UnitId unit) override { copies_[unit].buffer = {}; }
  void used_until(UnitId unit, const Event& read) override {
    if (copies_[unit].buffer) copies_[unit].buffer.used_until(read);
  }
  void used(UnitId unit) override { order_.used(unit); }

  /// Lets everybody know that a unit is coming. load() follows, which others may run before if it
  /// is spawned.
  void begin(UnitId unit) {
    Slot& slot = slots_[unit];
    ZIGGURAT_CHECK(slot.pins == 0, "unit {} is stale while in use", unit);
    drop(unit);
    slot.state = State::kComing;
    copies_[unit].settled.reset();
  }

  /// Loads a unit; returns when the copy is queued. Then land() waits for the copy.
  Task<> load(UnitId unit, Why why) {
    Slot& slot = slots_[unit];
    Copy& copy = copies_[unit];
    const std::uint64_t generation = generation_;
    std::exception_ptr error;
    try {
      co_await units_->at_home(unit, false);
      DeviceBuffer buffer = co_await room_for(unit, why);
      if (buffer && generation == generation_) {
        UnitParamHome::Loading loading = co_await units_->load(
            unit, buffer.data(), Need{.generation = generation_, .position = 0},
            why == Why::kAhead ? IoPriority::kPrefetch : IoPriority::kDemand);
        if (!loading.stale) {
          copy.buffer = std::move(buffer);
          copy.landed = loading.landed;
          context_.spawn_local(land(unit, std::move(loading)));
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
    // If another generation has begun meanwhile, the loaded parameters are stale, and acquire()
    // loads the unit again.
    const bool good = copy.buffer && generation == generation_;
    if (!good) copy.buffer = {};
    slot.generation = generation;
    slot.state = good ? State::kPresent : State::kAbsent;
    copy.settled.set();
    // Somebody may wait for memory, and a unit that was only prefetched can be dropped.
    room_.returned();
    if (error) std::rethrow_exception(error);
  }

  /// Takes memory for a unit. It may be empty for a unit that is brought ahead.
  Task<DeviceBuffer> room_for(UnitId unit, Why why) {
    const std::uint64_t size_bytes = units_->device_bytes(unit);
    if (why == Why::kAwaited) {
      co_return co_await allocate(size_bytes, Purpose::kParams);
    }
    if (why == Why::kAhead) {
      const std::uint64_t next = order_.next_use(unit);
      co_return room_.try_allocate(size_bytes, Purpose::kParams,
                                   [&] { return drop_farthest(next); });
    }
    DeviceBuffer buffer =
        room_.try_allocate(size_bytes, Purpose::kParams, [this] { return make_room(); });
    if (!buffer) throw room_.exhausted(size_bytes, "the rest is in use");
    co_return std::move(buffer);
  }

  /// Waits for a copy to end. A failed copy must end the run, because streams that wait for it go
  /// on without its bytes.
  Task<> land(UnitId unit, UnitParamHome::Loading loading) {
    try {
      co_await loading.landed.wait();
    } catch (const Error& error) {
      throw Error(
          error.code(),
          fmt::format("the parameters of unit {} ('{}', {}) did not reach the device: {}", unit,
                      units_->name(unit), format_bytes(units_->device_bytes(unit)), error.what()),
          error.native());
    }
  }

  std::vector<Copy> copies_;
};

}  // namespace ziggurat
