// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rendezvous.cc: connects the ranks and makes the back-end.
#include "collectives/rendezvous/rendezvous.h"

#include <fmt/format.h>

#include "base/log.h"
#include "collectives/exchange/exchange_communicator.h"
#include "collectives/mpi/mpi_channel.h"
#include "collectives/nccl/nccl_communicator.h"
#include "collectives/rendezvous/descriptors.h"
#include "collectives/rendezvous/rendezvous_protocol.h"
#include "collectives/self_communicator.h"

namespace ziggurat {

Task<TcpOptions> meet_ranks(Reactor& reactor, RankOptions options) {
  require_descriptors(options.rank, options.world_size);
  reactor.external_begin();
  const auto protocol = std::make_shared<RendezvousProtocol>(reactor, std::move(options));
  std::exception_ptr failure;
  TcpOptions connected;
  try {
    connected = co_await protocol->run();
  } catch (...) {
    failure = std::current_exception();
  }
  reactor.external_end();
  if (failure) std::rethrow_exception(failure);
  co_return connected;
}

std::unique_ptr<Communicator> connect_ranks(Reactor& reactor, WorkerPool& workers,
                                            const RankOptions& options) {
  if (options.world_size == 1) {
    if (options.collectives != Collectives::kAuto) {
      note_degraded("collectives",
                    fmt::format("collectives={} has no effect, because the job has one rank",
                                to_string(options.collectives)));
    }
    return std::make_unique<SelfCommunicator>();
  }
  // NCCL is opened before any rank waits for this one.
  const NcclOptions nccl{.timeout = options.call_timeout, .reduce = options.reduce};
  auto gpu =
      options.collectives == Collectives::kNccl ? open_nccl(nccl) : std::unique_ptr<NcclDevice>();
  ExchangeOptions connected =
      options.collectives == Collectives::kMpi
          ? over_mpi(reactor, MpiLink::open(), options)
          : over_sockets(reactor, reactor.block_on(meet_ranks(reactor, options)));
  auto transport = ExchangeTransport::create(reactor, workers, std::move(connected));
  if (gpu) return over_nccl(std::move(transport), std::move(gpu), nccl);
  return std::make_unique<ExchangeCommunicator>(std::move(transport));
}

}  // namespace ziggurat
