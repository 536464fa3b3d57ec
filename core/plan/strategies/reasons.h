// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/reasons.h: why a strategy is the one to begin with, and what would help
// where none fits, in sentences of core/plan/strategies/decision.cc.
//
// Pure functions; any thread.
#pragma once

#include <string>

#include "core/plan/strategies/compare.h"

namespace ziggurat {

/// Returns why the best one is, what to try second, and what speaks against others. Something fits.
std::string reason(const Job& job, const Comparison& comparison);

/// Returns what would make something fit, each tried. Nothing fits, and not all is refused.
std::string remedy(const Job& job, const Comparison& comparison);

}  // namespace ziggurat
