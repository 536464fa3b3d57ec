// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_order.cc: learns the order in which units are used.
#include "core/schedule/params/unit_order.h"

#include <algorithm>

namespace ziggurat {
namespace {

/// The number of uses out of order in one step after which the order is learned again.
constexpr std::size_t kSurprisesMax = 4;

}  // namespace

void UnitOrder::used(UnitId unit) {
  if (learning_) {
    order_.push_back(unit);
    position_ = order_.size();
    return;
  }
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const std::size_t at = (position_ + k) % order_.size();
    if (order_[at] != unit) continue;
    if (k > 0) ++surprises_;
    position_ = at + 1;
    return;
  }
  ++surprises_;
}

void UnitOrder::begin_step() {
  if (surprises_ > kSurprisesMax) order_.clear();
  learning_ = order_.empty();
  surprises_ = 0;
  position_ = 0;
}

std::uint64_t UnitOrder::next_use(UnitId unit) const {
  std::uint64_t distance = 1;
  for (std::size_t i = position_; i < order_.size(); ++i) {
    if (order_[i] == unit) return distance;
    distance += table_.unit(order_[i]).count;
  }
  return kNever;
}

std::span<const UnitId> UnitOrder::ahead(std::size_t count) const {
  const std::span<const UnitId> rest = std::span(order_).subspan(position_);
  return rest.first(std::min(count, rest.size()));
}

}  // namespace ziggurat
