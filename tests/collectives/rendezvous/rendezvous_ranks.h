// SPDX-License-Identifier: Apache-2.0
// tests/collectives/rendezvous/rendezvous_ranks.h: ranks that find each other on this host, and
// ranks that a test plays by hand.
#pragma once

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/rank_options.h"
#include "collectives/rendezvous/handshake.h"

namespace ziggurat {

/// Rank `rank` of `world`, which find each other at `port`; they have 30 s to come.
inline RankOptions options_of(int rank, int world, std::uint16_t port) {
  RankOptions options;
  options.rank = rank;
  options.world_size = world;
  options.rendezvous = "127.0.0.1:" + std::to_string(port);
  options.secret = "a secret of this test";
  options.connect_timeout = std::chrono::seconds(30);
  return options;
}

/// A connection to `port` whose handshake succeeded. Tries until it does: nobody listens yet, or
/// the acceptor has as many handshakes as it takes.
inline Task<std::shared_ptr<boost::asio::ip::tcp::socket>> call_until_accepted(Reactor& reactor,
                                                                               std::uint16_t port,
                                                                               Caller caller,
                                                                               Session* session) {
  namespace asio = boost::asio;
  for (;;) {
    const auto socket = std::make_shared<asio::ip::tcp::socket>(reactor.context());
    boost::system::error_code error;
    co_await socket->async_connect({asio::ip::address_v4::loopback(), port},
                                   asio::redirect_error(asio::use_awaitable, error));
    bool accepted = false;
    try {
      if (!error) *session = co_await call_handshake(*socket, "a secret of this test", caller);
      accepted = !error;
    } catch (const Error&) {  // tried again
    }
    if (accepted) co_return socket;
    const auto pause = std::make_shared<Signal>(reactor);
    reactor.clock().after(std::chrono::milliseconds(20), [pause] { pause->set(); });
    co_await pause->wait();
  }
}

}  // namespace ziggurat
