// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/home_gather.h: stages 1 and 2: the parameters that other ranks updated come
// home, once a generation, before anybody may use them.
//
// Units are gathered in the order of the model, which is the sweep's, one after another; what this
// rank's trainer uses, or when, has no part in it. So the sweep still trails into the next forward,
// and no order of use can make ranks wait for each other. Reactor's thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/homes.h"
#include "core/schedule/params/param_cache.h"

namespace ziggurat {

class HomeGather {
 public:
  /// The state stands at `generation`, and nothing of it was gathered yet.
  HomeGather(Context& context, ParamHome& home, ParamCache& cache, std::uint64_t generation);

  /// This rank's slice of `unit` stands at `generation` at home. Once all ranks' do, the cache is
  /// told.
  void slice_updated(UnitId unit, std::uint64_t generation);

 private:
  Task<> drain();
  bool ready() const noexcept { return updated_[next_unit_] >= next_generation_; }

  Context& context_;
  ParamHome& home_;
  ParamCache& cache_;
  std::vector<std::uint64_t> updated_;  ///< per unit: 1 + generation of this rank's slice
  std::uint64_t first_generation_;      ///< that of the first gather
  std::uint64_t next_generation_;       ///< 1 + that of the next gather
  UnitId next_unit_ = 0;
  bool draining_ = false;
};

}  // namespace ziggurat
