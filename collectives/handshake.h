// SPDX-License-Identifier: Apache-2.0
// collectives/handshake.h: two processes prove to each other that they know the job's secret,
// before either reads more than 64 bytes of the other.
//
// HMAC-SHA256 over both sides' random numbers and what the caller claims to be. Messages after it
// are signed under a key of that conversation; nothing is encrypted. Errors of all: kUnavailable,
// after which the socket is to be closed.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/runtime/reactor.h"

namespace ziggurat {

/// What a connection is for: to meet all ranks, or one of the two sockets between two of them.
enum class Errand : std::uint32_t { kJoin, kControl, kBulk };

/// Who calls, as it says itself.
struct Introduction {
  Errand errand = Errand::kJoin;
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::uint64_t epoch = 0;  ///< of the ranks' connection; 0 when they are to meet
};

using Digest = std::array<std::byte, 32>;
struct Conversation {
  Digest key{};
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_read = 0;
};

using Guest = std::pair<Introduction, Conversation>;

/// The side that called.
Task<Conversation> introduce(boost::asio::ip::tcp::socket& socket, const std::string& secret,
                             const Introduction& introduction);
/// The side that was called. Says nothing to whoever does not begin as a rank of this version.
Task<Guest> welcome(boost::asio::ip::tcp::socket& socket, const std::string& secret);

/// One short text, signed.
Task<> write_message(boost::asio::ip::tcp::socket& socket, Conversation& conversation,
                     const std::string& text);
Task<std::string> read_message(boost::asio::ip::tcp::socket& socket, Conversation& conversation,
                               std::size_t most_bytes);

/// From the system's generator.
std::uint64_t random_number();
/// 256 bits, in hexadecimal.
std::string random_secret();

}  // namespace ziggurat
