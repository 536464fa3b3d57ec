// SPDX-License-Identifier: Apache-2.0
// integrations/measure/tune.h: searches for the best block size and depth. It measures reads,
// writes and their mix over a grid, and then the best cells of each again, in turn.
#pragma once

#include <string>

#include "integrations/measure/result.h"
#include "integrations/measure/streams.h"

namespace ziggurat::measure {

/// Searches for about `seconds`. A file that is not ours is only read, so that write and mix stay
/// 0. Among the settings within kTuneSlack of the best, the one with the fewest bytes in flight is
/// chosen, because it costs least memory and has the shortest queue.
TuneResult tune(const Bench& bench, Target& target, double seconds);

inline constexpr double kTuneSlack = 0.02;

/// How far the GB/s of a trial may be from those of the fastest trial to count as equally fast,
/// because trials are short.
inline constexpr double kRowSlack = 0.05;

/// Returns the choice among settings from their rates. A pure function.
TuneChoice choose(const std::vector<TuneChoice>& measured);
/// Returns the choices among settings that differ in depth. A pure function.
DepthChoice choose_depth(const std::vector<TuneChoice>& measured);

}  // namespace ziggurat::measure
