// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/local_secret.h: a secret for ranks of one host that were given none. Rank
// 0 makes it, and gives it only to processes of its own user.
//
// It is sent over a Unix socket in the abstract namespace, named after the port of the rendezvous.
// The kernel tells each side which user the other is (SO_PEERCRED), so another user can neither get
// the secret nor give out a false one. Nothing is left on a disk.
#pragma once

#include <boost/asio/local/stream_protocol.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "base/runtime/async.h"

namespace ziggurat {

/// Rank 0's side: gives the secret out until it is closed.
class LocalSecret : public std::enable_shared_from_this<LocalSecret> {
 public:
  /// Errors: kUnavailable if the name is taken already.
  LocalSecret(Reactor& reactor, std::uint16_t port, std::string secret);
  void open();
  void close();

 private:
  static Task<> serve(std::shared_ptr<LocalSecret> self);

  Reactor& reactor_;
  boost::asio::local::stream_protocol::acceptor acceptor_;
  std::string secret_;
};

/// Gets the secret; for all ranks but 0. Empty if nobody gives one out at that port, or not yet.
/// Errors: kUnavailable, naming the user, if another user gives one out.
Task<std::string> local_secret(Reactor& reactor, std::uint16_t port);

}  // namespace ziggurat
