// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/brought.cc: keeps count of the units on the device, brings ahead, and drops.
#include "core/schedule/params/brought.h"

namespace ziggurat {

std::vector<UnitOrder::Kind> Brought::uses_of(const BroughtUnits& units) {
  std::vector<UnitOrder::Kind> kinds;
  for (UnitId u = 0; u < units.count(); ++u)
    kinds.push_back({.elements = units.elements(u), .optional = units.optional(u)});
  return kinds;
}

void Brought::release(UnitId unit, const Event& read) {
  Slot& slot = slots_[unit];
  ZIGGURAT_CHECK(slot.pins > 0, "unit {} is released more often than acquired", unit);
  if (!read.happened()) used_until(unit, read);
  if (--slot.pins > 0) return;
  if (!persists(unit) && order_.next_use(unit) > limits_.max_reuse_distance) drop(unit);
  prefetch();
  room_.returned();  // somebody may wait for memory, and an unpinned unit can be dropped
}

void Brought::begin_generation(std::uint64_t generation) {
  generation_ = generation;
  order_.begin_step();
  for (UnitId u = 0; u < slots_.size(); ++u) {
    if (!units_->trained(u)) {
      slots_[u].generation = generation;  // frozen: it is what it was
    } else if (slots_[u].pins == 0) {
      drop(u);
    }
    slots_[u].may_change = false;
  }
  prefetch();
}

void Brought::drop(UnitId unit) {
  Slot& slot = slots_[unit];
  if (slot.state != State::kPresent) return;
  slot.state = State::kAbsent;
  free(unit);
}

bool Brought::drop_farthest(std::uint64_t nearer_than) {
  UnitId victim = 0;
  std::uint64_t farthest = nearer_than;
  for (UnitId u = 0; u < slots_.size(); ++u) {
    const Slot& slot = slots_[u];
    if (slot.state != State::kPresent || slot.pins > 0 || persists(u)) continue;
    const std::uint64_t distance =
        slot.generation == generation_ ? order_.next_use(u) : UnitOrder::kNever;
    if (distance > farthest) {
      victim = u;
      farthest = distance;
    }
  }
  if (farthest == nearer_than) return false;
  drop(victim);
  return true;
}

/// Whether a unit stays on the device because it is small: dropping it would free less than it
/// costs to bring it again.
bool Brought::persists(UnitId unit) const {
  return units_->elements(unit) <= limits_.param_persistence_threshold &&
         slots_[unit].generation == generation_;
}

std::uint64_t Brought::live_count() const {
  std::uint64_t count = 0;
  for (UnitId u = 0; u < slots_.size(); ++u) {
    if (slots_[u].state != State::kAbsent && !persists(u)) count += units_->elements(u);
  }
  return count;
}

void Brought::prefetch() {
  if (!order_.known() || context_.cancel.cancelled()) return;
  bring_these(order_.ahead(limits_.prefetch_units_max));
}

void Brought::expect(std::span<const UnitId> units) {
  if (context_.cancel.cancelled()) return;
  bring_these(units);
}

Task<> Brought::clear() {
  cleared_ = true;
  co_await quiesce();
  for (UnitId u = 0; u < slots_.size(); ++u)
    if (slots_[u].pins == 0) drop(u);
}

void Brought::bring_these(std::span<const UnitId> units) {
  if (cleared_) return;
  std::uint64_t ahead = 0;
  for (const UnitId unit : units) {
    const Slot& slot = slots_[unit];
    ahead += units_->elements(unit);
    if (ahead > limits_.prefetch_elements_max) return;
    if (slot.state == State::kComing || slot.pins > 0 || slot.may_change) continue;
    if (is_there(unit)) continue;
    if (live_count() + units_->elements(unit) > limits_.max_live_parameters) return;
    if (!bring_ahead(unit)) return;
  }
}

}  // namespace ziggurat
