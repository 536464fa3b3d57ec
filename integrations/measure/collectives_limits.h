// SPDX-License-Identifier: Apache-2.0
// integrations/measure/collectives_limits.h: measures how fast bytes can go between these ranks if
// they are sent as our calls send them, but without our headers, checksums and sums.
//
// Every rank sends to every other rank at once, in both directions of each socket, in pieces of a
// chunk. It does so on one thread, as our calls do, and with a thread for each direction; the
// faster way counts. Each figure is the best of three rounds, because a limit is what can be
// reached.
#pragma once

#include <functional>

#include "base/runtime/reactor.h"
#include "collectives/mpi/mpi_link.h"
#include "collectives/rank_options.h"

namespace ziggurat::measure {

/// The limits of sockets in GB/s.
struct SocketLimits {
  double one_way = 0;   ///< speed from rank 0 to rank 1
  double exchange = 0;  ///< what each rank sends while it receives as much
};

/// Measures the sockets between all ranks. Errors: those of meet_ranks().
SocketLimits socket_limits(Reactor& reactor, const RankOptions& ranks);

/// Returns the GB/s that each rank sends in plain messages of a chunk's size while it receives as
/// much.
double mpi_limit(MpiLink& link);

/// Returns the GB/s at which each rank copies memory while all other ranks do so too. `meet` waits
/// for the other ranks.
double copy_limit(const std::function<void()>& meet);

}  // namespace ziggurat::measure
