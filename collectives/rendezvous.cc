// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous.cc: the ranks meet, and the back-end for what came of it.
#include "collectives/rendezvous.h"

#include "collectives/rank_meeting.h"
#include "collectives/self_communicator.h"
#include "collectives/tcp_communicator.h"

namespace ziggurat {

Task<TcpOptions> meet_ranks(Reactor& reactor, RankOptions options) {
  reactor.external_begin();
  const auto meeting = std::make_shared<RankMeeting>(reactor, std::move(options));
  std::exception_ptr failure;
  TcpOptions connected;
  try {
    connected = co_await meeting->run();
  } catch (...) {
    failure = std::current_exception();
  }
  reactor.external_end();
  if (failure) std::rethrow_exception(failure);
  co_return connected;
}

std::unique_ptr<Communicator> connect_ranks(Reactor& reactor, WorkerPool& workers,
                                            const RankOptions& options) {
  if (options.world_size == 1) return std::make_unique<SelfCommunicator>();
  TcpOptions connected = reactor.block_on(meet_ranks(reactor, options));
  return std::make_unique<TcpCommunicator>(
      TcpTransport::create(reactor, workers, std::move(connected)));
}

}  // namespace ziggurat
