// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/local_secret.cc: uses SO_PEERCRED on both sides of a Unix socket.
#include "collectives/rendezvous/local_secret.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "collectives/rendezvous/acceptor.h"

namespace ziggurat {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Local = asio::local::stream_protocol;

constexpr std::size_t kSecretBytes = 64;  // random_secret()
constexpr std::size_t kPortBytes = 5;     // decimal
constexpr Nanoseconds kPause = std::chrono::milliseconds(50);

Local::endpoint name_of(std::uint16_t port) {
  return Local::endpoint(std::string(1, '\0') + fmt::format("ziggurat-rendezvous-{}", port));
}

/// Returns the user of the other side.
uid_t user_of(Local::socket& socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    throw system_error(errno,
                       "cannot get the user of a process that joins: getsockopt(SO_PEERCRED)");
  return credentials.uid;
}

}  // namespace

LocalSecret::LocalSecret(Reactor& reactor, std::uint16_t port, const LocalInvitation& invitation)
    : reactor_(reactor),
      acceptor_(reactor.context()),
      message_(fmt::format("{}{:05}", invitation.secret, invitation.port)) {
  error_code error;
  acceptor_.open(Local(), error);
  if (!error) acceptor_.bind(name_of(port), error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    throw system_error(
        error.value(),
        fmt::format("another job or another user already has the Unix socket from which the "
                    "ranks of this host get their secret for port {}; choose "
                    "another port (ZIGGURAT_RENDEZVOUS), or set ZIGGURAT_SECRET",
                    port));
  }
}

void LocalSecret::open() {
  asio::co_spawn(reactor_.context(), serve(shared_from_this()), asio::detached);
}

void LocalSecret::close() {
  error_code ignored;  // the socket is released whatever close() returns
  acceptor_.close(ignored);
}

Task<> LocalSecret::serve(std::shared_ptr<LocalSecret> self) {
  while (self->acceptor_.is_open()) {
    Local::socket socket(self->reactor_.context());
    error_code error;
    co_await self->acceptor_.async_accept(socket, asio::redirect_error(asio::use_awaitable, error));
    if (!self->acceptor_.is_open()) co_return;
    if (error) {  // the TCP acceptor reports a lack of descriptors
      const auto pause = std::make_shared<Signal>(self->reactor_);
      self->reactor_.clock().after(kPause, [pause] { pause->set(); });
      co_await pause->wait();
      continue;
    }
    uid_t user = 0;
    try {
      user = user_of(socket);
    } catch (const Error& refused) {
      log().warn("{}", refused.what());
      continue;
    }
    if (user != ::geteuid()) {
      log().warn("user {} asked for the secret of this user's job and was refused", user);
      continue;
    }
    // So few bytes fit into the socket's buffer at once, no matter how slowly the other side reads.
    co_await asio::async_write(socket, asio::buffer(self->message_),
                               asio::redirect_error(asio::use_awaitable, error));
  }
}

Task<LocalInvitation> local_invitation(Reactor& reactor, std::uint16_t port, Nanoseconds patience) {
  const auto socket = std::make_shared<Local::socket>(reactor.context());
  const std::shared_ptr<void> waits = close_after(reactor, socket, patience);
  error_code error;
  co_await socket->async_connect(name_of(port), asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return LocalInvitation();
  if (const uid_t user = user_of(*socket); user != ::geteuid()) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("user {} hands out secrets for the ranks that meet at port {} of this "
                            "host, but this process runs as user {}; choose another port "
                            "(ZIGGURAT_RENDEZVOUS), or set ZIGGURAT_SECRET",
                            user, port, ::geteuid()));
  }
  std::string message(kSecretBytes + kPortBytes, '\0');
  co_await asio::async_read(*socket, asio::buffer(message),
                            asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return LocalInvitation();
  LocalInvitation invitation{message.substr(0, kSecretBytes)};
  std::from_chars(message.data() + kSecretBytes, message.data() + message.size(), invitation.port);
  co_return invitation;
}

}  // namespace ziggurat
