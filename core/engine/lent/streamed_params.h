// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/streamed_params.h: the parameters that a trainer does not lend: the engine keeps
// them at home and brings them to a device, all parameters of a unit of the trainer at once.
//
// A unit of the trainer consists of units of the table: large parameters have one each, small ones
// of one type share one. If each rank has slices, it is brought as one, of whole parameters
// (whole_units.h). Private to the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/device_span.h"
#include "base/error.h"
#include "core/engine/lent/whole_units.h"
#include "core/engine/lent_engine.h"
#include "core/engine/state/training_state.h"
#include "core/schedule/params/residency.h"
#include "core/schedule/turns.h"

namespace ziggurat {

/// Why a unit is acquired. The order in which units are used is learned from uses alone, and
/// quantized parameters come rounded for uses alone.
enum class Acquire : std::uint8_t { kUse, kAside };

class StreamedParams {
 public:
  /// `state` must have its table. Errors: MemoryExhausted if the largest unit does not fit the
  /// device.
  explicit StreamedParams(TrainingState& state);

  /// Makes the home of all parameters, also of those that are lent.
  std::unique_ptr<ParamHome> make_home(Context& context, const std::vector<StripePlace>& places);
  /// Makes what brings them. All ranks call it.
  Task<> build(Context& context);
  void close() {
    alive_.reset();
    wholes_ = nullptr;
    residency_.reset();
  }
  /// Waits until nothing is being brought, and other ranks ask for nothing more.
  Task<> quiesce() {
    if (wholes_ != nullptr) co_await wholes_->close();
    if (residency_) co_await residency_->quiesce();
  }
  /// Returns how many whole parameters there are, whose numbers follow those of the table's.
  std::size_t whole_count() const noexcept {
    return wholes_ == nullptr ? 0 : wholes_->param_count();
  }

  FromRanks from_ranks() const { return wholes_ == nullptr ? FromRanks{} : wholes_->from_ranks(); }

  // Calls of the trainer, one at a time. They throw kInvalidArgument and change nothing if the call
  // may not be made now.
  void require_unit(const char* call, StreamedUnit unit) const;
  /// Note that this thread begins to acquire a unit, and that it has released one: release()
  /// follows.
  void acquiring(StreamedUnit unit);
  void released(StreamedUnit unit);
  void require_acquired(const char* call, StreamedUnit unit) const;
  /// Throws unless the parameter is streamed, and its unit not acquired.
  void require_free(const char* call, ParamId param) const;
  /// Throws unless the parameter is in a unit that is acquired. Returns the unit.
  StreamedUnit require_acquired_param(const char* call, ParamId param) const;
  /// Fails those who wait in acquire(), and those who will, because nobody releases any more.
  void end_waits();
  /// Returns why no step can be made: a unit is acquired, or somebody is about to have it.
  std::optional<Error> refusal_of_step() const;

  // On the reactor.
  /// Brings all parts of a unit for `thread`, and pins them. Returns what readers wait for.
  Task<std::vector<Event>> acquire(StreamedUnit unit, std::thread::id thread, Acquire why);
  void release(StreamedUnit unit, const Event& read);
  void expect(std::span<const StreamedUnit> units);
  /// Throws if the unit, which is acquired, came rounded: what is written there would take
  /// rounded values home.
  void require_exact(const char* call, StreamedUnit unit) const;
  /// Brings home what the trainer has written into an acquired parameter, when `written` has
  /// happened. Its neighbours in a shared unit go home with it.
  Task<> store(ParamId param, Event written);
  /// Notes that all ranks write a parameter of the unit. Each has its own time for that, so nothing
  /// is brought ahead that some have written already, and others not yet.
  void written(StreamedUnit unit) {
    if (wholes_ == nullptr) return;
    residency_->params_may_change(units_[unit].parts.front().unit);
    wholes_->written();
  }
  /// Read and write a parameter at home. Nobody has its unit.
  Task<> read_home(ParamId param, TypedSpan<std::byte> values);
  Task<> write_home(ParamId param, TypedSpan<const std::byte> values);
  /// Returns which parameter of the table has what this rank stores of `param`: of a whole one its
  /// slice, if there is one.
  std::optional<ParamId> stored_in(ParamId param) const;
  /// Waits until nothing is being brought, and brings nothing more before the next generation.
  Task<> settle();
  void begin_generation(std::uint64_t generation) {
    if (wholes_ != nullptr) wholes_->begin_generation(generation);
    residency_->begin_generation(generation);
  }

  /// Returns where an acquired parameter is. Any thread that has acquired it.
  TypedDeviceSpan<std::byte> place(ParamId param) const;

 private:
  struct Part {
    UnitId unit;                           ///< of the residency: in the table, or a whole unit
    DeviceSpan<const std::byte> params{};  ///< while it is acquired
  };
  struct Unit {
    std::vector<Part> parts;
    std::vector<std::thread::id> holders;  ///< a thread for each acquire that has ended
    std::size_t acquiring = 0;             ///< how many have not
  };
  void describe() const;
  bool may_be_released() const;
  bool is_held(StreamedUnit unit) const;
  void require_going_on() const;
  bool is_quantized(StreamedUnit unit) const;
  Task<> bring_in_form(StreamedUnit unit, std::vector<Event>& landed, Acquire why);
  Task<> drop_other_form(StreamedUnit unit, WholeForm form);
  Task<> bring(StreamedUnit unit, std::vector<Event>& landed, Acquire why);
  Task<bool> try_bring(Unit& unit, std::vector<Event>& landed, Acquire why);
  Task<> release_elsewhere(StreamedUnit unit);
  Error no_room(StreamedUnit unit) const;
  void require_device_room() const;
  std::uint64_t device_bytes(const Unit& unit) const;
  std::uint64_t free_device_bytes() const;
  void find_parts();
  static Error not_streamed(const char* call, const ParamSpec& param);
  std::optional<std::size_t> whole_of(ParamId param) const;
  const Part& part_of(ParamId param) const;

  TrainingState& state_;
  mutable std::mutex mutex_;  // guards holders, counts and flags
  std::vector<Unit> units_;
  std::vector<std::thread::id> waiting_;  // threads that wait in acquire()
  bool ending_ = false;                   // end_waits() was called
  bool released_elsewhere_ = false;       // a thread released what another had acquired
  std::optional<Turns> turns_;            // of those that find no room
  std::uint64_t next_turn_ = 0;
  std::uint64_t releases_coming_ = 0;  // released() was called, and not yet release()
  std::uint64_t releases_ = 0;         // calls of release(); reactor's thread only
  UnitParamHome* home_ = nullptr;      // the state's
  std::unique_ptr<WholeUnits> made_;   // until the residency has it
  WholeUnits* wholes_ = nullptr;       // null if each rank has whole parameters
  std::unique_ptr<Residency> residency_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // until close()
};

}  // namespace ziggurat
