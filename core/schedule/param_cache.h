// SPDX-License-Identifier: Apache-2.0
// core/schedule/param_cache.h: which units' parameters are on the device: acquire and
// release, prefetch in learned order, and whom to drop when the device is full.
//
// The order of units is learned in the first step and is a hint ever after: a unit used out of
// order is loaded on demand. Victims are those whose next use is farthest (Belady's rule, on the
// learned order). All device memory that appears during a step is had through allocate(), so
// accumulators and gradients drive out clean parameters too. Reactor's thread only.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/homes.h"

namespace ziggurat {

struct ParamCacheLimits {
  std::uint64_t max_live_parameters;  ///< elements on the device that prefetch may reach
  /// Elements of other units' use within which a released unit is kept
  std::uint64_t max_reuse_distance;
  std::size_t prefetch_units_max = 2;  ///< units ahead of the trainer
};

class ParamCache {
 public:
  ParamCache(Context& context, ParamHome& home, ParamCacheLimits limits);
  ~ParamCache();
  ParamCache(const ParamCache&) = delete;
  ParamCache& operator=(const ParamCache&) = delete;

  /// Waits until `unit` is on the device at the current generation and pins it.
  Task<TypedSpan<const std::byte>> acquire(UnitId unit);
  void release(UnitId unit);

  /// Waits until `unit` stands at the current generation at home.
  Task<> wait_updated(UnitId unit);
  /// Device memory for something else; drops clean parameters, farthest next use first, and waits
  /// if it must. Errors: kResourceExhausted with the device's account when nothing can come back.
  Task<DeviceBuffer> allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Device memory came back: whoever waits in allocate() tries again.
  void memory_returned();

  /// Waits until nothing is being loaded: parameters may then change at home.
  Task<> quiesce();
  /// The parameters of `generation` are what acquire() gives from now on; what is cached is stale
  /// unless it already is.
  void begin_generation(std::uint64_t generation);
  /// All chunks of `unit` stand at `generation` at home.
  void unit_updated(UnitId unit, std::uint64_t generation);
  /// Everyone who waits, now and later, gets `error`.
  void fail(std::exception_ptr error);

 private:
  enum class State : std::uint8_t { kAbsent, kLoading, kPresent };
  struct Slot {
    explicit Slot(Reactor& reactor) : settled(reactor), updated(reactor) {}
    State state = State::kAbsent;
    DeviceBuffer buffer;
    std::uint64_t generation = 0;  // of buffer's contents
    std::size_t pins = 0;
    Signal settled;  // not loading
    std::uint64_t home_generation = 0;
    Signal updated;  // home_generation == generation_
  };

  Task<> load(UnitId unit, bool on_demand);
  DeviceBuffer allocate_now(std::uint64_t size_bytes, Purpose purpose, std::uint64_t nearer_than);
  bool drop_farthest(std::uint64_t nearer_than);
  void drop(Slot& slot);
  void learn(UnitId unit);
  void prefetch();
  std::uint64_t next_use(UnitId unit) const;
  std::uint64_t live_count() const;

  Context& context_;
  ParamHome& home_;
  ParamCacheLimits limits_;
  std::vector<Slot> slots_;
  std::uint64_t generation_ = 0;

  std::vector<UnitId> order_;  // of acquires in a step, learned
  std::size_t position_ = 0;   // next expected acquire
  bool learning_ = true;
  std::size_t surprises_ = 0;  // acquires out of the learned order in this step

  Signal memory_returned_;
  std::size_t memory_waiters_ = 0;
  std::exception_ptr error_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ziggurat
