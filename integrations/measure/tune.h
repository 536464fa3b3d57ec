// SPDX-License-Identifier: Apache-2.0
// integrations/measure/tune.h: the search for block size and depth: reads, writes and their mix
// over a grid, then the best of each again, in turn.
#pragma once

#include <string>

#include "integrations/measure/result.h"
#include "integrations/measure/streams.h"

namespace ziggurat::measure {

/// Takes about `seconds`. Somebody's file is only read: write and mix stay 0. Of settings within
/// kTuneSlack of the best, the one with the fewest bytes in flight is chosen: it costs least memory
/// and has the shortest queue.
TuneResult tune(const Bench& bench, Target& target, double seconds);

inline constexpr double kTuneSlack = 0.02;

/// A trial's GB/s may be this far from the fastest one's and be as good: it was short.
inline constexpr double kRowSlack = 0.05;

/// The choice among settings and their rates. Pure.
TuneChoice choose(const std::vector<TuneChoice>& measured);
/// The same of settings that differ in depth. Pure.
DepthChoice choose_depth(const std::vector<TuneChoice>& measured);

}  // namespace ziggurat::measure
