// SPDX-License-Identifier: Apache-2.0
// core/engine/units/trainer_calls.cc: the order of calls, and the messages for calls out of order.
#include "core/engine/units/trainer_calls.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {

TrainerCalls::TrainerCalls(const ModelSpec& model) {
  for (const UnitSpec& unit : model.units)
    units_.push_back({.name = unit.name, .frozen = unit.frozen()});
}

void TrainerCalls::refuse(const char* call, UnitId unit, const char* why) const {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}(unit {} '{}'): {}", call, unit, units_[unit].name, why));
}

void TrainerCalls::require_acquire(UnitId unit, std::uint64_t generation) const {
  const Unit& its = units_[unit];
  if (its.gradient == Gradient::kFinished) {
    refuse("acquire", unit,
           "the unit's gradient is finished in this step, so its parameters may be changing: "
           "acquire the unit before finish_gradient() or after step()");
  }
  if (its.held > 0 && its.held_generation != generation) {
    refuse(
        "acquire", unit,
        "the unit is still acquired with the parameters of an earlier step: call release() first");
  }
}

void TrainerCalls::acquired(UnitId unit, std::uint64_t generation) {
  ++units_[unit].held;
  units_[unit].held_generation = generation;
}

void TrainerCalls::require_release(UnitId unit) const {
  if (units_[unit].held == 0)
    refuse("release", unit, "the unit is not acquired: call release() once for each acquire()");
}

void TrainerCalls::require_gradient(UnitId unit) const {
  if (units_[unit].gradient == Gradient::kFinished) {
    refuse("gradient", unit,
           "the unit's gradient was already finished in this step: call step() before gradient()");
  }
}

void TrainerCalls::require_finish_gradient(UnitId unit) const {
  const Unit& its = units_[unit];
  switch (its.gradient) {
    case Gradient::kFinished:
      refuse("finish_gradient", unit,
             "the unit's gradient was already finished in this step: call finish_gradient() once "
             "for each step()");
    case Gradient::kNone:
      if (its.frozen) break;  // a frozen unit needs no gradient
      refuse("finish_gradient", unit,
             "the unit has no gradient yet: add one into gradient() first");
    case Gradient::kAccumulating: break;
  }
}

bool TrainerCalls::in_step() const noexcept {
  return std::ranges::any_of(units_, [](const Unit& u) { return u.gradient != Gradient::kNone; });
}

void TrainerCalls::ended_step() {
  for (Unit& unit : units_) unit.gradient = Gradient::kNone;
}

}  // namespace ziggurat
