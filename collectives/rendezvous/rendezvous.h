// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rendezvous.h: lets ranks meet once; afterwards nothing listens any more.
//
// Rank 0 listens at RankOptions::rendezvous. Every rank calls it, proves that it knows the secret,
// and says where it listens itself. When all are there, each gets the list, and each connects to
// the ranks below it.
#pragma once

#include <memory>

#include "base/runtime/worker_pool.h"
#include "collectives/communicator.h"
#include "collectives/rank_options.h"
#include "collectives/tcp/tcp_channel.h"

namespace ziggurat {

/// Connects sockets to all other ranks. Errors: kDeadlineExceeded, naming the ranks that did not
/// come; kInvalidArgument if there is no address although ranks are on several hosts, if a secret
/// is missing, or if ranks contradict each other.
Task<TcpOptions> meet_ranks(Reactor& reactor, RankOptions options);

/// Makes a communicator of all ranks of the job, perhaps of one. Blocks.
std::unique_ptr<Communicator> connect_ranks(Reactor& reactor, WorkerPool& workers,
                                            const RankOptions& options);

}  // namespace ziggurat
