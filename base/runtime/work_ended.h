// SPDX-License-Identifier: Apache-2.0
// base/runtime/work_ended.h: counts the pieces of work that a reactor had under way elsewhere (a
// transfer, a worker's job, a copy) and that have ended. The count grows as long as this rank makes
// progress. Other ranks ask for it before they give this rank up (collectives/exchange/patience.h).
#pragma once

#include <cstdint>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// Calls Reactor::external_end() and counts one ended piece of work. Reactor's thread.
void work_ended(Reactor& reactor);
/// Returns the count so far. Reactor's thread.
std::uint64_t work_ended_count(Reactor& reactor);

}  // namespace ziggurat
