// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/layout.cc: state by rank, the fewest devices and the traffic of a step.
#include "core/plan/strategies/layout.h"

#include <cmath>

namespace ziggurat {

StateBytes state_bytes(double count, const StateRecipe& recipe, const ParallelLayout& layout) {
  const double shards = layout.shards();
  const double divided = count / shards;
  StateBytes bytes;
  bytes.params = recipe.param * (layout.stage >= 3 ? divided : count);
  bytes.gradients = recipe.gradient * (layout.stage >= 2 ? divided : count);
  bytes.master = recipe.master * (layout.stage >= 1 ? divided : count);
  bytes.moments = recipe.moments * (layout.stage >= 1 ? divided : count);
  if (layout.hpz > 0) bytes.second_params = recipe.param * count / layout.hpz;
  return bytes;
}

std::int64_t fewest_devices(double count, const StateRecipe& recipe, double device_bytes,
                            double beside_bytes) {
  const double room = device_bytes - beside_bytes;
  if (room <= 0) return 0;
  return static_cast<std::int64_t>(std::ceil(count * recipe.total() / room));
}

}  // namespace ziggurat
