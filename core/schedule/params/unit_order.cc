// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_order.cc: learns the order in which units are used.
#include "core/schedule/params/unit_order.h"

#include <algorithm>
#include <cstddef>

namespace ziggurat {
namespace {

/// The number of uses out of order in one step after which the order is learned again.
constexpr std::size_t kSurprisesMax = 4;

}  // namespace

void UnitOrder::used(UnitId unit) {
  if (learning_) {
    order_.push_back({.unit = unit, .this_step = true});
    position_ = order_.size();
    return;
  }
  if (optional(unit)) return optional_used(unit);
  bool skips = false;
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const std::size_t at = (position_ + k) % order_.size();
    if (order_[at].unit != unit) {
      skips = skips || !optional(order_[at].unit);
      continue;
    }
    if (skips) ++surprises_;
    position_ = at + 1;
    return;
  }
  ++surprises_;
}

/// Finds an optional unit among those that may come before the next unit of all steps, or puts it
/// there.
void UnitOrder::optional_used(UnitId unit) {
  const auto here = order_.begin() + static_cast<std::ptrdiff_t>(position_);
  auto use = std::find_if(here, order_.end(),
                          [&](const Use& one) { return one.unit == unit || !optional(one.unit); });
  if (use == order_.end() || use->unit != unit) {
    // Behind the last place of a model of optional units alone the order would only grow.
    if (here == order_.end() &&
        std::ranges::all_of(order_, [&](const Use& one) { return optional(one.unit); }))
      return;
    use = order_.insert(here, {.unit = unit});
  }
  use->this_step = true;
  position_ = static_cast<std::size_t>(use - order_.begin()) + 1;
}

void UnitOrder::begin_step() {
  if (surprises_ > kSurprisesMax) order_.clear();
  std::erase_if(order_, [&](const Use& use) { return optional(use.unit) && !use.this_step; });
  for (Use& use : order_) {
    ++use.steps;
    use.this_step = false;
  }
  learning_ = order_.empty();
  surprises_ = 0;
  position_ = 0;
}

std::uint64_t UnitOrder::next_use(UnitId unit) const {
  std::uint64_t distance = 1;
  for (std::size_t i = position_; i < order_.size(); ++i) {
    if (order_[i].unit == unit) return distance;
    distance += units_[order_[i].unit].elements;
  }
  return kNever;
}

std::vector<UnitId> UnitOrder::ahead(std::size_t count) const {
  std::vector<UnitId> units;
  for (std::size_t i = position_; i < order_.size() && units.size() < count; ++i) {
    const Use& use = order_[i];
    if (use.steps > 1 || !optional(use.unit)) units.push_back(use.unit);
  }
  return units;
}

}  // namespace ziggurat
