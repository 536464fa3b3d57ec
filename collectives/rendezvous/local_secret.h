// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/local_secret.h: a secret for ranks that share a host and were given none:
// rank 0 makes it, and hands it to processes of its own user, and to nobody else.
//
// Over a Unix socket in the abstract namespace, named after the rendezvous' port: the kernel tells
// each side which user the other is (SO_PEERCRED), so another user can neither have the secret nor
// hand out one of theirs; and nothing is left behind on a disk.
#pragma once

#include <boost/asio/local/stream_protocol.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "base/runtime/async.h"

namespace ziggurat {

/// Rank 0's side: hands it out until it is closed.
class LocalSecret : public std::enable_shared_from_this<LocalSecret> {
 public:
  /// Errors: kUnavailable where somebody has the name already.
  LocalSecret(Reactor& reactor, std::uint16_t port, std::string secret);
  void open();
  void close();

 private:
  static Task<> serve(std::shared_ptr<LocalSecret> self);

  Reactor& reactor_;
  boost::asio::local::stream_protocol::acceptor acceptor_;
  std::string secret_;
};

/// The others' side. Empty: nobody hands one out there, or not yet. Errors: kUnavailable where it
/// is another user who does, naming them.
Task<std::string> local_secret(Reactor& reactor, std::uint16_t port);

}  // namespace ziggurat
