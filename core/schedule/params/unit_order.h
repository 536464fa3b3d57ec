// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_order.h: the order in which a trainer uses units. It is learned in a
// step and is a hint afterwards. Reactor's thread only.
//
// Each step may use other optional units (UnitSpec::optional), as a router calls other experts. So
// they are learned in every step, between the units that all steps use, and are no surprises.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/sharding/model_spec.h"

namespace ziggurat {

class UnitOrder {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  struct Kind {
    std::uint64_t elements = 0;
    bool optional = false;
  };

  explicit UnitOrder(std::vector<Kind> units) : units_(std::move(units)) {}

  /// Notes that the trainer uses `unit` now. If it is out of order (in an evaluation, or because
  /// the trainer branches), the place moves to the unit's next place in the order.
  void used(UnitId unit);
  /// Begins a step. If too many uses of the last one were a surprise, the order is learned again.
  void begin_step();

  /// Whether the order is learned.
  bool known() const noexcept { return !learning_; }
  /// Returns how many elements of other units are used before `unit` is used again in this step;
  /// kNever if it is not used again.
  std::uint64_t next_use(UnitId unit) const;
  /// Returns the next units, at most `count`. Of optional units, these are the ones that two steps
  /// have used at the same place.
  std::vector<UnitId> ahead(std::size_t count) const;

 private:
  struct Use {
    UnitId unit = 0;
    std::size_t steps = 0;   // in how many steps in a row an optional unit was used here before
    bool this_step = false;  // an optional unit was used here in this step
  };

  bool optional(UnitId unit) const { return units_[unit].optional; }
  void optional_used(UnitId unit);

  std::vector<Kind> units_;
  std::vector<Use> order_;
  std::size_t position_ = 0;  // the next expected use in order_
  bool learning_ = true;
  std::size_t surprises_ = 0;  // uses in this step that were not in the order
};

}  // namespace ziggurat
