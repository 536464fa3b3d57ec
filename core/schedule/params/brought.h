// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/brought.h: what the policies share that bring units to the device: which
// units are there, what is brought ahead of the trainer, and what gives way.
//
// The order of units is learned (unit_order.h): a unit that is used out of order is brought on
// demand. When the device is full, the unit whose next use is farthest is dropped (Belady's rule,
// on the learned order). Private to core/schedule/params. Reactor's thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "core/schedule/params/residency.h"
#include "core/schedule/params/unit_order.h"

namespace ziggurat {

class Brought : public Residency {
 public:
  void release(UnitId unit, const Event& read) override;
  void expect(std::span<const UnitId> units) override;
  Task<> clear() override;
  void brings_ahead() override { cleared_ = false; }
  void params_may_change(UnitId unit) noexcept override { slots_[unit].may_change = true; }
  void begin_generation(std::uint64_t generation) override;

 protected:
  /// kPresent means that what brings the unit is at least decided or queued.
  enum class State : std::uint8_t { kAbsent, kComing, kPresent };
  struct Slot {
    State state = State::kAbsent;
    std::uint64_t generation = 0;  ///< the parameters that are there are this generation's
    std::size_t pins = 0;
    bool may_change = false;  ///< parameters may change at home
  };

  Brought(Context& context, std::unique_ptr<BroughtUnits> units, const ResidencyLimits& limits)
      : Residency(context),
        units_(std::move(units)),
        limits_(limits),
        slots_(units_->count()),
        order_(uses_of(*units_)) {}

  /// Begins to bring `unit` ahead of its use. Returns false if nothing more can be brought now.
  virtual bool bring_ahead(UnitId unit) = 0;
  /// Frees the unit's memory on the device.
  virtual void free(UnitId unit) = 0;
  /// Notes that work reads the unit's memory until `read` happens.
  virtual void used_until(UnitId unit, const Event& read) = 0;

  /// Whether the unit is there at the current generation.
  bool is_there(UnitId unit) const {
    return slots_[unit].state == State::kPresent && slots_[unit].generation == generation_;
  }
  void drop(UnitId unit);
  /// Drops the unpinned unit whose next use is farthest, and farther than `nearer_than`. Returns
  /// false if there is none.
  bool drop_farthest(std::uint64_t nearer_than);
  void prefetch();

  std::unique_ptr<BroughtUnits> units_;
  ResidencyLimits limits_;
  std::vector<Slot> slots_;
  UnitOrder order_;
  std::uint64_t generation_ = 0;
  bool cleared_ = false;  // nothing is brought ahead

 private:
  static std::vector<UnitOrder::Kind> uses_of(const BroughtUnits& units);
  bool persists(UnitId unit) const;
  void bring_these(std::span<const UnitId> units);
  std::uint64_t live_count() const;
};

}  // namespace ziggurat
