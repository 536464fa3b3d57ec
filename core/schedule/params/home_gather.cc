// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/home_gather.cc: gathers one unit after another, and one generation after
// another.
#include "core/schedule/params/home_gather.h"

#include <utility>

namespace ziggurat {

HomeGather::HomeGather(Context& context, UnitParamHome& home, Residency& residency,
                       std::uint64_t generation)
    : context_(context),
      home_(home),
      residency_(residency),
      updated_(context.table.unit_count(), 0),
      first_generation_(generation),
      next_generation_(generation + 1) {}

void HomeGather::slice_updated(UnitId unit, std::uint64_t generation) {
  updated_[unit] = generation + 1;
  if (ready() && !std::exchange(draining_, true)) context_.spawn(drain());
}

Task<> HomeGather::drain() {
  while (ready()) {
    const UnitId unit = next_unit_;
    const std::uint64_t generation = next_generation_ - 1;
    const bool changed =
        generation == first_generation_ || !context_.table.model().units[unit].constant();
    if (changed) {
      co_await residency_.readers_done(unit);
      co_await home_.gather(unit, Need{.generation = generation, .position = unit});
    }
    context_.gates.at_home(unit, generation);
    if (++next_unit_ == updated_.size()) {
      next_unit_ = 0;
      ++next_generation_;
    }
  }
  draining_ = false;
}

}  // namespace ziggurat
