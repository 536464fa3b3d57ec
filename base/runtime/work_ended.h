// SPDX-License-Identifier: Apache-2.0
// base/runtime/work_ended.h: how much of the work that a reactor has under way elsewhere (a
// transfer, a worker's job, a copy) has ended. It grows for as long as this rank gets anything
// done, which is what other ranks ask before they give it up (collectives/exchange/patience.h).
#pragma once

#include <cstdint>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// One piece: Reactor::external_end(), counted. Reactor's thread.
void work_ended(Reactor& reactor);
/// So far. Reactor's thread.
std::uint64_t work_ended_count(Reactor& reactor);

}  // namespace ziggurat
