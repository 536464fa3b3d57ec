// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_order.h: the order in which a trainer uses units. It is learned in a
// step and is a hint afterwards. Reactor's thread only.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/sharding/chunk_table.h"

namespace ziggurat {

class UnitOrder {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  explicit UnitOrder(const ChunkTable& table) : table_(table) {}

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
  /// Returns the next units, at most `count`.
  std::span<const UnitId> ahead(std::size_t count) const;

 private:
  const ChunkTable& table_;
  std::vector<UnitId> order_;
  std::size_t position_ = 0;  // the next expected use in order_
  bool learning_ = true;
  std::size_t surprises_ = 0;  // uses in this step that were not in the order
};

}  // namespace ziggurat
