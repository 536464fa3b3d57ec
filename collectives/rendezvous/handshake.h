// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/handshake.h: lets two processes prove to each other that they know the
// job's secret, before either reads more than 64 bytes from the other.
//
//   caller                             acceptor
//   hello: who it is, a nonce     ->
//                                 <-   a nonce
//   proof: HMAC of all that       ->   refuses a wrong one; nothing it has sent so far
//                                 <-   was made of the secret. A proof of its own, or zeros
//
// Each proof names the side that proves, so none can be sent back. The later messages use keys of
// this session, one per direction. Nothing is encrypted. Errors of all functions: kUnavailable; the
// caller then closes the socket.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/runtime/reactor.h"
#include "collectives/exchange/frame_seal.h"

namespace ziggurat {

/// The purpose of a connection: to join the rendezvous, or one of the two sockets between two
/// ranks.
enum class ConnectionKind : std::uint32_t { kJoin, kControl, kBulk };

/// A caller, as it describes itself.
struct Caller {
  ConnectionKind purpose = ConnectionKind::kJoin;
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::uint64_t epoch = 0;  ///< epoch of the ranks' connection; 0 when they join
};

using Digest = std::array<std::byte, 32>;

/// The keys that both sides of a connection share after the handshake.
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

/// Does the caller's side. Errors: also kInvalidArgument, if the other side has another secret.
Task<Session> call_handshake(boost::asio::ip::tcp::socket& socket, const std::string& secret,
                             const Caller& caller);
/// Does the acceptor's side. Sends nothing to a caller that does not begin as a rank of this
/// version. `proven` is called when the caller has proven that it knows the secret, just before it
/// is told that it is accepted: whoever limits the handshake's time ends the limit there, or one
/// side could hold a connection that the other has closed.
Task<Accepted> accept_handshake(boost::asio::ip::tcp::socket& socket, const std::string& secret,
                                std::function<void()> proven = {});

/// Sends one short, signed text; read_message() receives and checks one.
Task<> write_message(boost::asio::ip::tcp::socket& socket, Session& session,
                     const std::string& text);
Task<std::string> read_message(boost::asio::ip::tcp::socket& socket, Session& session,
                               std::size_t most_bytes);

/// Returns the key for payloads that `rank` sends in the connection `epoch` of all ranks.
wire::SealKey payload_key(const std::string& secret, std::uint64_t epoch, int rank);

}  // namespace ziggurat
