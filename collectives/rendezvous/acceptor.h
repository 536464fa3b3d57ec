// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/acceptor.h: a listening socket that hands on the connections of those who
// know the secret. Whatever else comes costs a bounded number of sockets, 5 s each, and nothing of
// the job's.
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
  /// What to do with a connection; an Error it throws ends that connection only.
  using OnAccepted = std::function<Task<>(std::shared_ptr<Socket>, Accepted)>;

  static constexpr std::size_t kHandshakesMax = 256;  // at a time
  static constexpr Nanoseconds kHandshakeTime = std::chrono::seconds(5);

  /// Listens at `at` (port 0: any). Errors: errno's of the address.
  Acceptor(Reactor& reactor, const Endpoint& at, std::string secret);
  /// Every address of this machine, IPv4 and, where there is any, IPv6.
  static Endpoint every_address(std::uint16_t port);

  /// `failed` hears of what the acceptor does not survive: this process has no descriptor left.
  void open(OnAccepted on_accepted, std::function<void(const Error&)> failed);
  /// Nobody listens any more; handshakes under way lead nowhere.
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

/// Closes `socket` after `patience`, unless what it returns is gone by then.
std::shared_ptr<void> close_after(Reactor& reactor, const std::shared_ptr<Acceptor::Socket>& socket,
                                  Nanoseconds patience);

}  // namespace ziggurat
