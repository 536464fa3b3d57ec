// SPDX-License-Identifier: Apache-2.0
// core/schedule/unit_gates.h: a gate for each unit, open while the unit's parameters are at home at
// the generation that the trainer uses. Reactor's thread only.
//
// Without clipping, updates run during backward, so a unit may be at home at the next generation
// already. Its gate stays open: nobody waits for the unit in this step any more.
#pragma once

#include <cstdint>
#include <vector>

#include "base/runtime/async.h"
#include "base/runtime/metrics.h"
#include "core/sharding/chunk_table.h"

namespace ziggurat {

class UnitGates {
 public:
  /// All gates are closed.
  UnitGates(CancelScope& cancel, const Clock& clock, Metrics& metrics, std::size_t units);

  /// Notes that all chunks of `unit` are at home at `generation`, and opens its gate.
  void at_home(UnitId unit, std::uint64_t generation);
  /// Closes the gates of all units that are not at home at `generation` yet.
  void begin_generation(std::uint64_t generation);

  /// Waits until the gate of `unit`, or of every unit, is open. Counts the time as waiting for the
  /// sweep. Errors: the scope's.
  Task<> wait(UnitId unit);
  Task<> wait_all();
  /// Returns the signal that is set while the gate is open.
  Signal& gate(UnitId unit) noexcept { return gates_[unit].open; }

 private:
  struct Gate {
    explicit Gate(CancelScope& cancel) : open(cancel) {}
    Signal open;
    std::uint64_t home_generation = 0;
  };
  const Clock& clock_;
  Metrics& metrics_;
  std::vector<Gate> gates_;
};

}  // namespace ziggurat
