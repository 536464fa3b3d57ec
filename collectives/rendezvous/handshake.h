// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/handshake.h: two processes prove to each other that they know the job's
// secret, before either reads more than 64 bytes of the other.
//
//   caller                             acceptor
//   hello: who it is, a nonce     ->
//                                 <-   a nonce
//   proof: HMAC of all that       ->   refuses what is wrong; nothing it has sent so far
//                                 <-   was made of the secret. A proof of its own, or zeros
//
// Each proof names who proves, so none can be sent back. The keys of what follows are the
// session's and the direction's. Nothing is encrypted. Errors of all: kUnavailable, after which the
// socket is to be closed.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/runtime/reactor.h"
#include "collectives/exchange/frame_seal.h"

namespace ziggurat {

/// What a connection is for: to join the rendezvous, or one of the two sockets between two ranks.
enum class ConnectionKind : std::uint32_t { kJoin, kControl, kBulk };

/// Who calls, as it says itself.
struct Caller {
  ConnectionKind purpose = ConnectionKind::kJoin;
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::uint64_t epoch = 0;  ///< of the ranks' connection; 0 when they join
};

using Digest = std::array<std::byte, 32>;

/// What both sides of a connection share after the handshake.
struct Session {
  struct Direction {
    Digest key{};
    std::uint64_t messages = 0;
  };
  Direction sent, received;
  wire::ConnectionKeys frames;
};

struct Accepted {
  Caller caller;
  Session session;
};

/// The side that called. Errors: kInvalidArgument also, where the other side has another secret.
Task<Session> call_handshake(boost::asio::ip::tcp::socket& socket, const std::string& secret,
                             const Caller& caller);
/// The side that was called. Says nothing to whoever does not begin as a rank of this version.
Task<Accepted> accept_handshake(boost::asio::ip::tcp::socket& socket, const std::string& secret);

/// One short text, signed.
Task<> write_message(boost::asio::ip::tcp::socket& socket, Session& session,
                     const std::string& text);
Task<std::string> read_message(boost::asio::ip::tcp::socket& socket, Session& session,
                               std::size_t most_bytes);

/// Seals the payloads that `rank` sends in the connection `epoch` of all ranks.
wire::SealKey payload_key(const std::string& secret, std::uint64_t epoch, int rank);

}  // namespace ziggurat
