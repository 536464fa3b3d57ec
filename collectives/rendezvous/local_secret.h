// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/local_secret.h: a secret for ranks of one host that were given none, and
// the port where they join. Rank 0 makes it, and gives it only to processes of its own user.
//
// It is sent over a Unix socket in the abstract namespace, named after the port of the rendezvous.
// The kernel tells each side which user the other is (SO_PEERCRED), so another user can neither get
// the secret nor give out a false one. Nothing is left on a disk. Rank 0 listens at another port
// than the rendezvous names where that one is taken: launchers make it from another port or from
// the job's number, and any process may have it for a connection of its own.
#pragma once

#include <boost/asio/local/stream_protocol.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "base/runtime/async.h"

namespace ziggurat {

/// What the ranks of a host get from rank 0.
struct LocalInvitation {
  std::string secret;
  std::uint16_t port = 0;  ///< where rank 0 listens
};

/// Rank 0's side: gives the invitation out until it is closed.
class LocalSecret : public std::enable_shared_from_this<LocalSecret> {
 public:
  /// `port` is the rendezvous'. Errors: kUnavailable if its name is taken already.
  LocalSecret(Reactor& reactor, std::uint16_t port, const LocalInvitation& invitation);
  void open();
  void close();

 private:
  static Task<> serve(std::shared_ptr<LocalSecret> self);

  Reactor& reactor_;
  boost::asio::local::stream_protocol::acceptor acceptor_;
  std::string message_;
};

/// Gets the invitation; for all ranks but 0. Its secret is empty if nobody gives one out for that
/// port, not yet, or not within `patience`, as a process that is stopped does. Errors:
/// kUnavailable, naming the user, if another user gives one out.
Task<LocalInvitation> local_invitation(Reactor& reactor, std::uint16_t port, Nanoseconds patience);

}  // namespace ziggurat
