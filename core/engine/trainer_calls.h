// SPDX-License-Identifier: Apache-2.0
// core/engine/trainer_calls.h: which calls a trainer may make next, unit by unit.
//
// Every call of Engine that names a unit is judged here first, on the caller's thread and before
// it changes anything: a call out of order is kInvalidArgument, naming the call, the unit and what
// to do instead, and the engine stays usable. What lies below may rely on the order. Private to the
// engine, which makes one call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/sharding/model_spec.h"

namespace ziggurat {

class TrainerCalls {
 public:
  explicit TrainerCalls(const ModelSpec& model);

  /// `call` may be made now. Errors: kInvalidArgument.
  void require_unit(const char* call, UnitId unit) const;
  void require_acquire(UnitId unit, std::uint64_t generation) const;
  void require_release(UnitId unit) const;
  void require_gradient(UnitId unit) const;
  void require_finish_gradient(UnitId unit) const;

  /// It was made, and succeeded.
  void acquired(UnitId unit, std::uint64_t generation);
  void released(UnitId unit) { --units_[unit].held; }
  void has_gradient(UnitId unit) { units_[unit].gradient = Gradient::kAccumulating; }
  void finished_gradient(UnitId unit) { units_[unit].gradient = Gradient::kFinished; }
  /// A gradient was asked for, and the step was not made yet.
  bool in_step() const noexcept;
  /// The step was made, or undone.
  void ended_step();

 private:
  enum class Gradient : std::uint8_t { kNone, kAccumulating, kFinished };
  struct Unit {
    std::string name;
    bool frozen = false;
    std::size_t held = 0;               // acquires that are not released
    std::uint64_t held_generation = 0;  // of what is held
    Gradient gradient = Gradient::kNone;
  };
  [[noreturn]] void refuse(const char* call, UnitId unit, const char* why) const;

  std::vector<Unit> units_;
};

}  // namespace ziggurat
