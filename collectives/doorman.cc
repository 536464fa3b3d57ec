// SPDX-License-Identifier: Apache-2.0
// collectives/doorman.cc: one coroutine that accepts, one for each guest.
#include "collectives/doorman.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {

namespace asio = boost::asio;
using boost::system::error_code;

std::shared_ptr<void> close_after(Reactor& reactor, const std::shared_ptr<Doorman::Socket>& socket,
                                  Nanoseconds patience) {
  auto alive = std::make_shared<int>(0);
  reactor.clock().after(patience, [weak = std::weak_ptr<int>(alive),
                                   socket = std::weak_ptr<Doorman::Socket>(socket)] {
    const auto held = socket.lock();
    if (weak.expired() || !held) return;
    error_code ignored;  // the socket is released whatever close() says
    held->close(ignored);
  });
  return alive;
}

Doorman::Doorman(Reactor& reactor, const asio::ip::tcp::endpoint& at, std::string secret)
    : reactor_(reactor), acceptor_(reactor.context()), secret_(std::move(secret)) {
  const auto must = [&](const char* what, const error_code& error) {
    if (!error) return;
    std::ostringstream where;
    where << at;
    throw system_error(error.value(),
                       fmt::format("{} at {}, where ranks are to meet", what, where.str()));
  };
  error_code error;
  acceptor_.open(at.protocol(), error);
  must("socket", error);
  acceptor_.set_option(asio::socket_base::reuse_address(true), error);
  must("setsockopt(SO_REUSEADDR)", error);
  acceptor_.bind(at, error);
  must("bind", error);
  acceptor_.listen(asio::socket_base::max_listen_connections, error);
  must("listen", error);
  address_ = acceptor_.local_endpoint(error);
  must("getsockname", error);
}

void Doorman::open(OnGuest on_guest) {
  on_guest_ = std::move(on_guest);
  asio::co_spawn(reactor_.context(), accept(shared_from_this()), asio::detached);
}

void Doorman::close() {
  error_code ignored;  // the socket is released whatever close() says
  acceptor_.close(ignored);
  on_guest_ = {};
}

Task<> Doorman::accept(std::shared_ptr<Doorman> self) {
  for (;;) {
    const auto socket = std::make_shared<Socket>(self->reactor_.context());
    error_code error;
    co_await self->acceptor_.async_accept(*socket,
                                          asio::redirect_error(asio::use_awaitable, error));
    if (!self->acceptor_.is_open()) co_return;
    if (error) {  // too many files, say: what is being welcomed ends within kPatience
      const auto pause = std::make_shared<Signal>(self->reactor_);
      self->reactor_.clock().after(std::chrono::milliseconds(100), [pause] { pause->set(); });
      co_await pause->wait();
      continue;
    }
    if (self->guests_ < kGuestsMax) {
      ++self->guests_;
      asio::co_spawn(self->reactor_.context(), greet(self, socket), asio::detached);
    }
  }
}

Task<> Doorman::greet(std::shared_ptr<Doorman> self, std::shared_ptr<Socket> socket) {
  try {
    std::shared_ptr<void> patience = close_after(self->reactor_, socket, kPatience);
    Guest guest = co_await welcome(*socket, self->secret_);
    if (self->on_guest_) {
      const OnGuest on_guest = self->on_guest_;  // close() may be called meanwhile
      Task<> visit = on_guest(socket, guest);
      patience.reset();
      co_await std::move(visit);
    }
  } catch (const std::exception& error) {
    log().debug("turned away: {}", error.what());
  }
  --self->guests_;
}

}  // namespace ziggurat
