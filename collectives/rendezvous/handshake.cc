// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/handshake.cc: proofs and keys are the HMAC-SHA256 of their purpose, the
// hello and the acceptor's nonce.
#include "collectives/rendezvous/handshake.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "collectives/random.h"

namespace ziggurat {
namespace {

namespace asio = boost::asio;
using Socket = asio::ip::tcp::socket;

/// The first message, as it is on the wire.
struct Hello {
  std::array<char, 8> magic{'z', 'i', 'g', '-', 'r', 'a', 'n', 'k'};
  std::uint32_t version = 2;
  ConnectionKind purpose = ConnectionKind::kJoin;
  std::int32_t rank = 0;
  std::int32_t world_size = 0;
  std::uint64_t epoch = 0;
  Digest nonce{};
};
static_assert(sizeof(Hello) == 64);

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::kUnavailable, text); }

Digest hmac(std::span<const std::byte> key, std::span<const std::byte> bytes) {
  Digest digest;
  unsigned length = 0;
  const unsigned char* const made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
           reinterpret_cast<unsigned char*>(digest.data()), &length);
  if (made == nullptr || length != digest.size()) refuse("libcrypto cannot compute HMAC-SHA256");
  return digest;
}

/// Derives a value from the secret for this handshake alone. Each `use` gives another value.
Digest derive(const std::string& secret, std::string_view use, const Hello& hello,
              const Digest& nonce) {
  std::vector<std::byte> text;
  const auto add = [&](std::span<const std::byte> part) {
    text.insert(text.end(), part.begin(), part.end());
  };
  add(std::as_bytes(std::span(use)));
  add(std::as_bytes(std::span(&hello, 1)));
  add(nonce);
  return hmac(std::as_bytes(std::span(secret)), text);
}

Session session_of(const std::string& secret, const Hello& hello, const Digest& nonce,
                   bool caller) {
  const auto key = [&](std::string_view use) { return derive(secret, use, hello, nonce); };
  Session session;
  Session::Direction& from_caller = caller ? session.sent : session.received;
  Session::Direction& from_acceptor = caller ? session.received : session.sent;
  from_caller.key = key("messages of the caller");
  from_acceptor.key = key("messages of the acceptor");
  (caller ? session.frames.send : session.frames.receive) = key("frames of the caller");
  (caller ? session.frames.receive : session.frames.send) = key("frames of the acceptor");
  return session;
}

bool same(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Task<> read_exactly(Socket& socket, std::span<std::byte> bytes) {
  boost::system::error_code error;
  co_await asio::async_read(socket, asio::buffer(bytes.data(), bytes.size()),
                            asio::redirect_error(asio::use_awaitable, error));
  if (error) refuse("the connection ended during the handshake: " + error.message());
}

Task<> write_exactly(Socket& socket, std::span<const std::byte> bytes) {
  boost::system::error_code error;
  co_await asio::async_write(socket, asio::buffer(bytes.data(), bytes.size()),
                             asio::redirect_error(asio::use_awaitable, error));
  if (error) refuse("the connection ended during the handshake: " + error.message());
}

template <class Value>
std::span<const std::byte> bytes_of(const Value& value) {
  return std::as_bytes(std::span(&value, 1));
}
template <class Value>
std::span<std::byte> place_of(Value& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

Digest signature(Session::Direction& direction, const std::string& text) {
  const std::string signed_text = fmt::format("{}:{}", direction.messages++, text);
  return hmac(direction.key, std::as_bytes(std::span(signed_text)));
}

constexpr std::string_view kProofOfCaller = "caller";
constexpr std::string_view kProofOfAcceptor = "acceptor";
constexpr Digest kRefusal{};  // sent in place of a proof

}  // namespace

Task<Session> call_handshake(Socket& socket, const std::string& secret, const Caller& caller) {
  Hello hello;
  hello.purpose = caller.purpose;
  hello.rank = caller.rank;
  hello.world_size = caller.world_size;
  hello.epoch = caller.epoch;
  fill_random(hello.nonce);
  co_await write_exactly(socket, bytes_of(hello));
  Digest nonce;
  co_await read_exactly(socket, nonce);
  const Digest own = derive(secret, kProofOfCaller, hello, nonce);
  co_await write_exactly(socket, own);
  Digest theirs;
  co_await read_exactly(socket, theirs);
  if (!same(theirs, derive(secret, kProofOfAcceptor, hello, nonce))) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "the process that listens there does not know this job's secret: it is another job's "
        "rendezvous, or the secret (ZIGGURAT_SECRET) differs between ranks");
  }
  co_return session_of(secret, hello, nonce, /*caller=*/true);
}

Task<Accepted> accept_handshake(Socket& socket, const std::string& secret,
                                std::function<void()> proven) {
  Hello hello;
  co_await read_exactly(socket, place_of(hello));
  const Hello expected;
  if (hello.magic != expected.magic || hello.version != expected.version ||
      hello.purpose > ConnectionKind::kBulk || hello.rank < 0 || hello.rank >= hello.world_size) {
    refuse("a caller's first bytes are not those of a rank of this version");
  }
  Digest nonce;
  fill_random(nonce);
  co_await write_exactly(socket, nonce);
  Digest proof;
  co_await read_exactly(socket, proof);
  if (!same(proof, derive(secret, kProofOfCaller, hello, nonce))) {
    co_await write_exactly(socket, kRefusal);
    refuse(fmt::format("a caller that claims to be rank {} does not know the secret", hello.rank));
  }
  if (proven) proven();
  const Digest own = derive(secret, kProofOfAcceptor, hello, nonce);
  co_await write_exactly(socket, own);
  Accepted accepted;
  accepted.caller = {hello.purpose, hello.rank, hello.world_size, hello.epoch};
  accepted.session = session_of(secret, hello, nonce, /*caller=*/false);
  co_return accepted;
}

Task<> write_message(Socket& socket, Session& session, const std::string& text) {
  const auto length = static_cast<std::uint32_t>(text.size());
  const Digest digest = signature(session.sent, text);
  co_await write_exactly(socket, bytes_of(length));
  co_await write_exactly(socket, std::as_bytes(std::span(text)));
  co_await write_exactly(socket, digest);
}

Task<std::string> read_message(Socket& socket, Session& session, std::size_t most_bytes) {
  std::uint32_t length = 0;
  co_await read_exactly(socket, place_of(length));
  if (length > most_bytes)
    refuse(fmt::format("a message has {} bytes, but the limit is {}", length, most_bytes));
  std::string text(length, '\0');
  co_await read_exactly(socket, std::as_writable_bytes(std::span(text)));
  Digest digest;
  co_await read_exactly(socket, digest);
  if (!same(digest, signature(session.received, text))) refuse("a message has a wrong signature");
  co_return text;
}

wire::SealKey payload_key(const std::string& secret, std::uint64_t epoch, int rank) {
  const std::string use = fmt::format("payloads of rank {} in epoch {}", rank, epoch);
  return hmac(std::as_bytes(std::span(secret)), std::as_bytes(std::span(use)));
}

}  // namespace ziggurat
