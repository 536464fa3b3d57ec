// SPDX-License-Identifier: Apache-2.0
// tests/collectives/tcp_ranks.h: ranks of one process, connected over loopback without a
// rendezvous.
#pragma once

#include <memory>
#include <vector>

#include "collectives/tcp/tcp_channel.h"

namespace ziggurat {

inline constexpr std::uint64_t kTestEpoch = 0x5eed;

/// Two sockets that are connected to each other.
std::pair<std::unique_ptr<TcpSocket>, std::unique_ptr<TcpSocket>> connected_pair(Reactor& a,
                                                                                 Reactor& b);

/// A key for each number.
wire::SealKey test_key(std::size_t number);

/// Options for each of `reactors.size()` ranks. Rank r is on host r / ranks_per_host: ranks of one
/// host read each other's memory, and frames between hosts are sealed with keys. 0: all are on one
/// host, and use sockets.
std::vector<TcpOptions> connected_options(const std::vector<Reactor*>& reactors,
                                          std::size_t ranks_per_host = 0);

}  // namespace ziggurat
