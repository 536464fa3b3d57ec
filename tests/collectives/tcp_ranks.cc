// SPDX-License-Identifier: Apache-2.0
// tests/collectives/tcp_ranks.cc: a listener for each pair of sockets.
#include "tests/collectives/tcp_ranks.h"

#include <fmt/format.h>

#include <boost/asio/ip/tcp.hpp>
#include <cstring>

namespace ziggurat {

std::pair<std::unique_ptr<TcpSocket>, std::unique_ptr<TcpSocket>> connected_pair(Reactor& a,
                                                                                 Reactor& b) {
  namespace ip = boost::asio::ip;
  ip::tcp::acceptor acceptor(b.context(), ip::tcp::endpoint(ip::address_v4::loopback(), 0));
  auto first = std::make_unique<TcpSocket>(a.context());
  auto second = std::make_unique<TcpSocket>(b.context());
  first->connect(acceptor.local_endpoint());
  acceptor.accept(*second);
  return {std::move(first), std::move(second)};
}

wire::SealKey test_key(std::size_t number) {
  wire::SealKey key{};
  std::memcpy(key.data(), &number, sizeof(number));
  return key;
}

std::vector<TcpOptions> connected_options(const std::vector<Reactor*>& reactors,
                                          std::size_t ranks_per_host) {
  const std::size_t world = reactors.size();
  std::vector<TcpOptions> options(world);
  for (std::size_t r = 0; r < world; ++r) {
    options[r].rank = static_cast<int>(r);
    options[r].epoch = kTestEpoch;
    options[r].peers.resize(world);
    for (std::size_t p = 0; p < world; ++p) {
      if (ranks_per_host == 0) continue;
      options[r].peers[p].host = fmt::format("host {}", p / ranks_per_host);
      options[r].peers[p].memory = own_memory_probe();
    }
  }
  const bool several_hosts = ranks_per_host != 0 && ranks_per_host < world;
  for (std::size_t r = 0; several_hosts && r < world; ++r) {
    for (TcpOptions& its : options) its.peers[r].payload_key = test_key(r);
    for (std::size_t p = 0; p < world; ++p) {
      if (p == r) continue;
      options[r].peers[p].control_keys = {test_key(100 * r + p + 1000),
                                          test_key(100 * p + r + 1000)};
      options[r].peers[p].bulk_keys = {test_key(100 * r + p + 9000), test_key(100 * p + r + 9000)};
    }
  }
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t p = r + 1; p < world; ++p) {
      std::tie(options[r].peers[p].control, options[p].peers[r].control) =
          connected_pair(*reactors[r], *reactors[p]);
      std::tie(options[r].peers[p].bulk, options[p].peers[r].bulk) =
          connected_pair(*reactors[r], *reactors[p]);
    }
  }
  return options;
}

}  // namespace ziggurat
