// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/acceptor.h: a listening socket that accepts only connections from
// processes that know the secret. Other connections cost a limited number of sockets for 5 s each,
// and do not disturb the job.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/rendezvous/handshake.h"

namespace ziggurat {

class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using Endpoint = boost::asio::ip::tcp::endpoint;
  /// Called for each accepted connection; an Error that it throws ends that connection only.
  using OnAccepted = std::function<Task<>(std::shared_ptr<Socket>, Accepted)>;

  static constexpr std::size_t kHandshakesMax = 256;  // at one time
  static constexpr Nanoseconds kHandshakeTime = std::chrono::seconds(5);

  /// Listens at `at`; port 0 means any port. Errors: errno's of the address.
  Acceptor(Reactor& reactor, const Endpoint& at, std::string secret);
  /// Returns the endpoint for every address of this machine: IPv4 and, if there is any, IPv6.
  static Endpoint every_address(std::uint16_t port);

  /// Begins to accept. `failed` is called for an error after which the acceptor cannot go on: this
  /// process has no descriptor left.
  void open(OnAccepted on_accepted, std::function<void(const Error&)> failed);
  /// Stops listening. Handshakes under way have no effect any more.
  void close();
  Endpoint address() const { return address_; }

 private:
  static Task<> accept(std::shared_ptr<Acceptor> self);
  static Task<> greet(std::shared_ptr<Acceptor> self, std::shared_ptr<Socket> socket);

  Reactor& reactor_;
  boost::asio::ip::tcp::acceptor acceptor_;
  Endpoint address_;
  std::string secret_;
  OnAccepted on_accepted_;
  std::function<void(const Error&)> failed_;
  std::size_t handshakes_ = 0;
};

/// Closes `socket` after `patience`, unless the returned object was destroyed before.
template <typename Socket>
std::shared_ptr<void> close_after(Reactor& reactor, const std::shared_ptr<Socket>& socket,
                                  Nanoseconds patience) {
  auto alive = std::make_shared<int>(0);
  reactor.clock().after(
      patience, [weak = std::weak_ptr<int>(alive), socket = std::weak_ptr<Socket>(socket)] {
        const auto held = socket.lock();
        if (weak.expired() || !held) return;
        boost::system::error_code ignored;  // the socket is released whatever close() returns
        held->close(ignored);
      });
  return alive;
}

}  // namespace ziggurat
