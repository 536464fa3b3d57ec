// SPDX-License-Identifier: Apache-2.0
// core/schedule/unit_uses.h: keeps those who read what a unit's parameters are at home, and their
// state, apart from the one who writes a part of it. Parameters of a unit lie in the same items.
//
//   UnitUses::Use reading = co_await uses.read(unit);  the values stay until `reading` ends
//
// Reactor's thread only.
#pragma once

#include <map>
#include <utility>

#include "base/runtime/async.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

class UnitUses {
 public:
  explicit UnitUses(CancelScope& cancel) : ended_(cancel) {}

  /// Ends with its scope.
  class Use {
   public:
    Use(UnitUses& uses, UnitId unit, int step) : uses_(&uses), unit_(unit), step_(step) {}
    Use(Use&& other) noexcept
        : uses_(std::exchange(other.uses_, nullptr)), unit_(other.unit_), step_(other.step_) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (uses_ != nullptr) uses_->end(unit_, step_);
    }

   private:
    UnitUses* uses_;
    UnitId unit_;
    int step_;
  };

  /// Waits while the unit is written.
  Task<Use> read(UnitId unit) {
    while (count_[unit] < 0) co_await any_end();
    ++count_[unit];
    co_return Use(*this, unit, 1);
  }
  /// Waits until nobody reads or writes the unit.
  Task<Use> write(UnitId unit) {
    while (count_[unit] != 0) co_await any_end();
    --count_[unit];
    co_return Use(*this, unit, -1);
  }

 private:
  Task<> any_end() {
    ended_.reset();
    co_await ended_.wait();
  }
  void end(UnitId unit, int step) {
    if ((count_[unit] -= step) == 0) count_.erase(unit);
    ended_.set();
  }

  std::map<UnitId, int> count_;  // of readers; -1: it is written
  Signal ended_;                 // some use has
};

}  // namespace ziggurat
