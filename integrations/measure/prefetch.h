// SPDX-License-Identifier: Apache-2.0
// integrations/measure/prefetch.h: reads the units of a model, each of which must be there when the
// one before has been computed, and measures how many come too late and by how much.
//
// The consumer is a clock on which a unit takes unit_bytes / pace to compute. As in training, at
// most two units are read ahead of the one in use. A late unit stalls the consumer, and every later
// unit is due that much later.
#pragma once

#include "integrations/measure/streams.h"

namespace ziggurat::measure {

struct PrefetchPlan {
  std::string name;
  double seconds = 0;
  std::uint32_t depth = 1;
  std::uint32_t block_bytes = 0;
  std::uint64_t unit_bytes = 0;
  double pace_gb_per_s = 0;
};
/// Runs the plan. Files of our own must hold Content::kPages.
Measurement run_prefetch(const Bench& bench, Targets targets, const PrefetchPlan& plan);

}  // namespace ziggurat::measure
