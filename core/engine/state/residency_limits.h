// SPDX-License-Identifier: Apache-2.0
// core/engine/state/residency_limits.h: what a config says about parameters on the device.
#pragma once

#include <cstdint>
#include <limits>

#include "core/engine/engine_config.h"
#include "core/plan/prefetch_depth.h"
#include "core/schedule/params/residency.h"

namespace ziggurat {

/// Returns the limits for the units of `table`, of which the plan says how many come ahead.
inline ResidencyLimits residency_limits(const EngineConfig& config, const ChunkTable& table) {
  // Without a limit, a unit is kept even if its next use is not known.
  const auto limit = [](std::uint64_t elements) {
    return elements < kElementsMax ? elements : std::numeric_limits<std::uint64_t>::max();
  };
  return {.max_live_parameters = limit(config.max_live_parameters),
          .max_reuse_distance = limit(config.max_reuse_distance),
          .param_persistence_threshold = config.param_persistence_threshold,
          .prefetch_elements_max = limit(config.prefetch_elements_max),
          .prefetch_units_max =
              units_ahead(table, config.placement, most_outstanding_bytes(config.store))};
}

}  // namespace ziggurat
