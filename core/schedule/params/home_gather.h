// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/home_gather.h: in stages 1 and 2, brings home the parameters that other
// ranks have updated, once in each generation and before anybody may use them.
//
// Units are gathered one after another in the order of the model, which is also the order of the
// sweep. When this rank's trainer uses which unit does not matter. So the sweep still trails into
// the next forward, and no order of use can make ranks wait for each other forever. Reactor's
// thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/homes/param_home.h"
#include "core/schedule/params/residency.h"

namespace ziggurat {

class HomeGather {
 public:
  /// Begins with the state at `generation`, of which nothing was gathered yet.
  HomeGather(Context& context, UnitParamHome& home, Residency& residency, std::uint64_t generation);

  /// Notes that this rank's slice of `unit` is at home at `generation`. Once that is so on all
  /// ranks, the unit is gathered and its gate opens.
  void slice_updated(UnitId unit, std::uint64_t generation);

 private:
  Task<> drain();
  bool ready() const noexcept { return updated_[next_unit_] >= next_generation_; }

  Context& context_;
  UnitParamHome& home_;
  Residency& residency_;
  std::vector<std::uint64_t> updated_;  ///< per unit: 1 + the generation of this rank's slice
  std::uint64_t first_generation_;      ///< the generation of the first gather
  std::uint64_t next_generation_;       ///< 1 + the generation of the next gather
  UnitId next_unit_ = 0;
  bool draining_ = false;
};

}  // namespace ziggurat
