// SPDX-License-Identifier: Apache-2.0
// core/schedule/unit_gather.h: stage 3: whole units on the device, each gathered from the slices of
// all ranks, in the order in which they are started.
//
// Every rank starts the same gathers in the same order, in memory of its own: a region of one size
// on all ranks, cut up by the same calls, so that whether a unit fits is the same everywhere and
// nothing is started that then has to wait for memory. One coroutine makes the gathers; a slow
// slice delays those behind it. Reactor's thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <optional>

#include "core/schedule/context.h"
#include "core/schedule/homes.h"
#include "tiers/arena.h"

namespace ziggurat {

class UnitGather {
 public:
  /// `region`: device memory, as long on every rank.
  UnitGather(Context& context, ParamHome& home, DeviceBuffer region);

  /// Bytes of region that `unit` takes.
  static std::uint64_t place_bytes(const ChunkTable& table, UnitId unit) noexcept;

  /// A unit's place, and the gather that fills it.
  struct Flight {
    UnitId unit;
    std::byte* memory;
    std::uint64_t size_bytes;
    Signal* updated;  ///< this rank's slice is at home
    Need need;
    bool wanted = false;  ///< somebody waits
    Signal done;
  };
  /// Starts the gather of `unit` in a place that is free now; nullptr if none is.
  std::shared_ptr<Flight> start(UnitId unit, Need need, Signal& updated);
  /// Frees the place at once; a gather under way there ends before the next begins.
  void free(const Flight& flight) noexcept;
  void hurry(Flight& flight);

  /// Nothing is under way.
  Task<> idle();
  /// Which units were started since the last call, in order, as a hash: the same on every rank.
  std::uint64_t take_order() noexcept;
  void fail(std::exception_ptr error);

 private:
  using FlightPtr = std::shared_ptr<Flight>;
  Task<> drain();
  Task<> land(FlightPtr flight, Task<> gathering);

  Context& context_;
  ParamHome& home_;
  DeviceBuffer region_;
  Arena arena_;
  std::deque<FlightPtr> queue_;
  std::list<FlightPtr> under_way_;  ///< taken from the queue, not done
  bool draining_ = false;
  Signal idle_;
  std::uint64_t order_ = 0;
};

}  // namespace ziggurat
