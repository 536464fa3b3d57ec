// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/streamed_acquire.cc: brings units for threads that wait for them, and lets them
// go.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "core/engine/lent/streamed_params.h"

namespace ziggurat {

Task<std::vector<Event>> StreamedParams::acquire(StreamedUnit unit, std::thread::id thread,
                                                 Acquire why) {
  std::vector<Event> landed;
  std::exception_ptr error;
  try {
    state_.check();
    residency_->look_again();  // this thread may have been the last that could release something
    if (is_quantized(unit)) {
      co_await bring_in_form(unit, landed, why);
    } else {
      co_await bring(unit, landed, why);
    }
  } catch (...) {
    error = std::current_exception();
  }
  {
    // Here and not on the trainer's thread: until then others would take it for one that waits.
    const std::lock_guard lock(mutex_);
    waiting_.erase(std::ranges::find(waiting_, thread));
    --units_[unit].acquiring;
    if (!error) units_[unit].holders.push_back(thread);
    if (error && ending_) {
      throw Error(ErrorCode::kCancelled,
                  fmt::format("acquire(unit {}): the engine was closed meanwhile", unit));
    }
  }
  if (error) std::rethrow_exception(error);
  co_return landed;
}

bool StreamedParams::is_quantized(StreamedUnit unit) const {
  return wholes_ != nullptr && wholes_->quantized(units_[unit].parts.front().unit);
}

/// Brings a unit whose parameters are quantized: rounded for a use, and else as they are.
Task<> StreamedParams::bring_in_form(StreamedUnit unit, std::vector<Event>& landed, Acquire why) {
  if (why == Acquire::kUse) {
    co_await drop_other_form(unit, WholeForm::kQuantized);
    co_await bring(unit, landed, why);
    co_return;
  }
  const UnitId its = units_[unit].parts.front().unit;
  std::exception_ptr error;
  wholes_->begin_exact(its);
  try {
    co_await drop_other_form(unit, WholeForm::kExact);
    co_await bring(unit, landed, why);
  } catch (...) {
    error = std::current_exception();
  }
  wholes_->end_exact(its);
  if (error) std::rethrow_exception(error);
}

/// Drops what is there of a unit, or comes, in another form. A use takes the exact values that
/// somebody has acquired. Errors: kInvalidArgument if rounded ones are in use.
Task<> StreamedParams::drop_other_form(StreamedUnit unit, WholeForm form) {
  const UnitId its = units_[unit].parts.front().unit;
  if (wholes_->loaded_form(its) == form) co_return;
  const bool gone = co_await residency_->drop_unused(its);
  if (gone || form == WholeForm::kQuantized) co_return;
  if (wholes_->loaded_form(its) == form) co_return;  // another thread has brought it meanwhile
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("acquire_aside(unit {}): the unit is acquired for a forward or backward, which "
                  "has its parameters rounded to int8: release it before",
                  unit));
}

void StreamedParams::require_exact(const char* call, StreamedUnit unit) const {
  const UnitId its = units_[unit].parts.front().unit;
  if (!is_quantized(unit) || wholes_->loaded_form(its) == WholeForm::kExact) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}(unit {}): the unit was acquired for a forward or backward, which has its "
                  "parameters rounded to int8: release it, and acquire it aside to write it",
                  call, unit));
}

/// If the parts find no room, drops all that is not held, so that they lie in a row, and then waits
/// for what is released. Those who wait hold nothing meanwhile, and take turns.
Task<> StreamedParams::bring(StreamedUnit unit, std::vector<Event>& landed, Acquire why) {
  if (co_await try_bring(units_[unit], landed, why)) co_return;
  const std::uint64_t turn = next_turn_++;
  co_await turns_->wait(turn);
  std::exception_ptr error;
  try {
    for (bool there = false; !there;) {
      require_going_on();
      const std::uint64_t before = releases_;
      co_await residency_->clear();
      if (device_bytes(units_[unit]) > free_device_bytes()) {
        co_await release_elsewhere(unit);
        continue;
      }
      there = co_await try_bring(units_[unit], landed, Acquire::kAside);
      // There is enough, but not in a row. What was taken for some parts comes back too, and helps
      // nobody.
      while (!there && releases_ == before) {
        co_await release_elsewhere(unit);
        require_going_on();
      }
    }
  } catch (const MemoryExhausted&) {
    error = std::make_exception_ptr(no_room(unit));
  } catch (...) {
    error = std::current_exception();
  }
  residency_->brings_ahead();
  turns_->next();
  if (error) std::rethrow_exception(error);
}

/// Waits until another thread may have released a unit. Throws if none will: a reactor that talks
/// to other ranks never comes to a standstill by which that would be found.
Task<> StreamedParams::release_elsewhere(StreamedUnit unit) {
  require_going_on();
  if (!may_be_released()) throw no_room(unit);
  co_await residency_->room_returned();
}

/// Pins all parts, or none and returns false.
Task<bool> StreamedParams::try_bring(Unit& unit, std::vector<Event>& landed, Acquire why) {
  landed.clear();
  std::exception_ptr error;
  bool full = false;
  try {
    for (Part& part : unit.parts) {
      if (why == Acquire::kUse) residency_->used(part.unit);
      const Residency::Acquired its =
          co_await residency_->acquire(part.unit, Residency::Room::kThereNow);
      landed.push_back(its.landed);
      // Another thread that has acquired the unit may be reading this, and it is the same then.
      if (part.params.address() != its.params.address()) part.params = its.params;
    }
  } catch (const MemoryExhausted&) {
    full = true;
  } catch (...) {
    error = std::current_exception();
  }
  if (!error && !full) co_return true;
  for (std::size_t i = 0; i < landed.size(); ++i) residency_->release(unit.parts[i].unit, {});
  if (error) std::rethrow_exception(error);
  co_return false;
}

/// Makes the error for a unit whose memory nobody will give back.
Error StreamedParams::no_room(StreamedUnit unit) const {
  std::vector<std::size_t> held;
  std::uint64_t needed_bytes = device_bytes(units_[unit]);
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (u == unit || units_[u].holders.empty()) continue;
      held.push_back(u);
      needed_bytes += device_bytes(units_[u]);
    }
  }
  return {ErrorCode::kResourceExhausted,
          fmt::format(
              "acquire(unit {}): its parameters take {}, for which the {} for units have no room "
              "beside what is acquired (unit {}): release one before, or give "
              "`device_memory={} MiB`",
              unit, format_bytes(device_bytes(units_[unit])),
              format_bytes(state_.device().account().capacity_bytes()),
              fmt::join(held, " and unit "), round_up(needed_bytes, kMiB) / kMiB + 1)};
}

void StreamedParams::release(StreamedUnit unit, const Event& read) {
  {
    const std::lock_guard lock(mutex_);
    --releases_coming_;
  }
  ++releases_;
  for (const Part& part : units_[unit].parts) residency_->release(part.unit, read);
}

}  // namespace ziggurat
