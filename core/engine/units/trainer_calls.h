// SPDX-License-Identifier: Apache-2.0
// core/engine/units/trainer_calls.h: checks which calls a trainer may make next, for each unit.
//
// Every call of a step that names a unit of the model is checked here first, on the caller's thread
// and before it changes anything. A call out of order throws kInvalidArgument, which names the
// call, the unit and what to do instead, and the engine stays usable. The engine below may rely on
// the order. Private to the engine, which makes one call at a time.
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

  /// Throw kInvalidArgument if the call may not be made now.
  void require_acquire(UnitId unit, std::uint64_t generation) const;
  void require_release(UnitId unit) const;
  void require_gradient(UnitId unit) const;
  void require_finish_gradient(UnitId unit) const;

  /// Record that the call of this name was made and succeeded.
  void acquired(UnitId unit, std::uint64_t generation);
  void released(UnitId unit) { --units_[unit].held; }
  void has_gradient(UnitId unit) { units_[unit].gradient = Gradient::kAccumulating; }
  void finished_gradient(UnitId unit) { units_[unit].gradient = Gradient::kFinished; }
  /// Whether a gradient was asked for since the last step was made.
  bool in_step() const noexcept;
  /// Records that the step was made or undone.
  void ended_step();

 private:
  enum class Gradient : std::uint8_t { kNone, kAccumulating, kFinished };
  struct Unit {
    std::string name;
    bool frozen = false;
    std::size_t held = 0;               // acquires that are not released
    std::uint64_t held_generation = 0;  // generation of the parameters that are held
    Gradient gradient = Gradient::kNone;
  };
  [[noreturn]] void refuse(const char* call, UnitId unit, const char* why) const;

  std::vector<Unit> units_;
};

}  // namespace ziggurat
