// SPDX-License-Identifier: Apache-2.0
// integrations/measure/collectives_limits.h: how fast bytes can go between these ranks without any
// of our headers, checksums or sums, the way our calls send them.
//
// Every rank to every other at once, both directions of each socket at once, in pieces of a chunk:
// as ours, on one thread, and with a thread for each direction; whichever is faster. Each figure is
// the best of three: a limit is what can be reached.
#pragma once

#include <functional>

#include "base/runtime/reactor.h"
#include "collectives/mpi/mpi_link.h"
#include "collectives/rank_options.h"

namespace ziggurat::measure {

/// GB/s.
struct SocketLimits {
  double one_way = 0;   ///< from rank 0 to rank 1
  double exchange = 0;  ///< that each rank sends, while it receives as much
};

/// Errors: meet_ranks'.
SocketLimits socket_limits(Reactor& reactor, const RankOptions& ranks);

/// That each rank sends, while it receives as much: plain messages of a chunk's size.
double mpi_limit(MpiLink& link);

/// What each rank reaches, copying memory while all others do; `meet` waits for them.
double copy_limit(const std::function<void()>& meet);

}  // namespace ziggurat::measure
