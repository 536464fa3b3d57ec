// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rendezvous.h: ranks find each other, once; after it nothing listens.
//
// Rank 0 listens at RankOptions::rendezvous. Every rank calls it, proves the secret, and says where
// it listens itself; when all are there each gets the list, and ranks connect to those below them.
#pragma once

#include <memory>

#include "base/runtime/worker_pool.h"
#include "collectives/communicator.h"
#include "collectives/rank_options.h"
#include "collectives/tcp/tcp_channel.h"

namespace ziggurat {

/// The sockets to all other ranks. Errors: kDeadlineExceeded, naming who did not come;
/// kInvalidArgument for addresses (none, where ranks are on several hosts), a missing secret, ranks
/// that contradict each other.
Task<TcpOptions> meet_ranks(Reactor& reactor, RankOptions options);

/// A communicator of all ranks of the job; of this one alone where there is one. Blocks.
std::unique_ptr<Communicator> connect_ranks(Reactor& reactor, WorkerPool& workers,
                                            const RankOptions& options);

}  // namespace ziggurat
