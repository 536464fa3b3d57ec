// SPDX-License-Identifier: Apache-2.0
// collectives/doorman.h: a listening socket that lets in who knows the secret. Whatever else comes
// costs a bounded number of sockets, 5 s each, and nothing of the job's.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <string>

#include "base/runtime/async.h"
#include "collectives/handshake.h"

namespace ziggurat {

class Doorman : public std::enable_shared_from_this<Doorman> {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  /// What to do with a guest; an Error it throws ends that guest's visit only.
  using OnGuest = std::function<Task<>(std::shared_ptr<Socket>, Guest)>;

  static constexpr std::size_t kGuestsMax = 256;  // being welcomed at a time
  static constexpr Nanoseconds kPatience = std::chrono::seconds(5);

  /// Listens at `at` (port 0: any). Errors: errno's of the address.
  Doorman(Reactor& reactor, const boost::asio::ip::tcp::endpoint& at, std::string secret);
  void open(OnGuest on_guest);
  /// Nobody listens any more, and who was not let in is out.
  void close();
  boost::asio::ip::tcp::endpoint address() const { return address_; }

 private:
  static Task<> accept(std::shared_ptr<Doorman> self);
  static Task<> greet(std::shared_ptr<Doorman> self, std::shared_ptr<Socket> socket);

  Reactor& reactor_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::ip::tcp::endpoint address_;
  std::string secret_;
  OnGuest on_guest_;
  std::size_t guests_ = 0;
};

/// Closes `socket` after `patience`, unless what it returns is gone by then.
std::shared_ptr<void> close_after(Reactor& reactor, const std::shared_ptr<Doorman::Socket>& socket,
                                  Nanoseconds patience);

}  // namespace ziggurat
