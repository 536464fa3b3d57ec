// SPDX-License-Identifier: Apache-2.0
// core/schedule/unit_gates.cc: opens and closes the gates of units.
#include "core/schedule/unit_gates.h"

#include "core/schedule/context.h"

namespace ziggurat {

UnitGates::UnitGates(CancelScope& cancel, const Clock& clock, Metrics& metrics, std::size_t units)
    : clock_(clock), metrics_(metrics) {
  for (std::size_t u = 0; u < units; ++u) gates_.emplace_back(cancel);
}

void UnitGates::at_home(UnitId unit, std::uint64_t generation) {
  gates_[unit].home_generation = generation;
  gates_[unit].open.set();
}

void UnitGates::begin_generation(std::uint64_t generation) {
  for (Gate& gate : gates_) {
    if (gate.home_generation < generation) gate.open.reset();
  }
}

Task<> UnitGates::wait(UnitId unit) {
  Signal& open = gates_[unit].open;
  if (open.is_set()) {
    co_await open.wait();  // rethrows a failure
    co_return;
  }
  const CountedTime waited(clock_, metrics_, Counter::kWaitSweepNs);
  co_await open.wait();
}

Task<> UnitGates::wait_all() {
  for (UnitId u = 0; u < gates_.size(); ++u) co_await wait(u);
}

}  // namespace ziggurat
