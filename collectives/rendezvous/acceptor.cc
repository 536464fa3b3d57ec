// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/acceptor.cc: one coroutine accepts connections, and one per connection
// does the handshake.
#include "collectives/rendezvous/acceptor.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "collectives/rendezvous/descriptors.h"

namespace ziggurat {

namespace asio = boost::asio;
using boost::system::error_code;

Acceptor::Endpoint Acceptor::every_address(std::uint16_t port) {
  const Endpoint both(asio::ip::tcp::v6(), port);
  asio::io_context context;
  asio::ip::tcp::acceptor tried(context);
  error_code error;
  tried.open(both.protocol(), error);
  if (!error) tried.set_option(asio::ip::v6_only(false), error);
  if (!error) tried.bind({asio::ip::tcp::v6(), 0}, error);
  return error ? Endpoint(asio::ip::tcp::v4(), port) : both;
}

Acceptor::Acceptor(Reactor& reactor, const Endpoint& at, std::string secret)
    : reactor_(reactor), acceptor_(reactor.context()), secret_(std::move(secret)) {
  const auto must = [&](const char* what, const error_code& error) {
    if (!error) return;
    std::ostringstream where;
    where << at;
    throw system_error(error.value(), fmt::format("{} failed at {}, the address where ranks join",
                                                  what, where.str()));
  };
  error_code error;
  acceptor_.open(at.protocol(), error);
  must("socket", error);
  acceptor_.set_option(asio::socket_base::reuse_address(true), error);
  must("setsockopt(SO_REUSEADDR)", error);
  if (at.address().is_v6()) {
    acceptor_.set_option(asio::ip::v6_only(!at.address().is_unspecified()), error);
    must("setsockopt(IPV6_V6ONLY)", error);
  }
  acceptor_.bind(at, error);
  must("bind", error);
  acceptor_.listen(asio::socket_base::max_listen_connections, error);
  must("listen", error);
  address_ = acceptor_.local_endpoint(error);
  must("getsockname", error);
}

void Acceptor::open(OnAccepted on_accepted, std::function<void(const Error&)> failed) {
  on_accepted_ = std::move(on_accepted);
  failed_ = std::move(failed);
  asio::co_spawn(reactor_.context(), accept(shared_from_this()), asio::detached);
}

void Acceptor::close() {
  error_code ignored;  // the socket is released whatever close() returns
  acceptor_.close(ignored);
  on_accepted_ = {};
  failed_ = {};
}

Task<> Acceptor::accept(std::shared_ptr<Acceptor> self) {
  for (;;) {
    const auto socket = std::make_shared<Socket>(self->reactor_.context());
    error_code error;
    co_await self->acceptor_.async_accept(*socket,
                                          asio::redirect_error(asio::use_awaitable, error));
    if (!self->acceptor_.is_open()) co_return;
    if (out_of_descriptors(error.value())) {
      if (self->failed_)
        self->failed_(descriptor_error(error.value(), "cannot accept the connection of a rank"));
      co_return;
    }
    if (error) {  // the caller is gone already, or the kernel is short of memory
      const auto pause = std::make_shared<Signal>(self->reactor_);
      self->reactor_.clock().after(std::chrono::milliseconds(100), [pause] { pause->set(); });
      co_await pause->wait();
      continue;
    }
    if (self->handshakes_ < kHandshakesMax) {
      ++self->handshakes_;
      asio::co_spawn(self->reactor_.context(), greet(self, socket), asio::detached);
    }
  }
}

Task<> Acceptor::greet(std::shared_ptr<Acceptor> self, std::shared_ptr<Socket> socket) {
  try {
    std::shared_ptr<void> patience = close_after(self->reactor_, socket, kHandshakeTime);
    std::function<void()> end_patience = [&patience] { patience.reset(); };
    Task<Accepted> handshake = accept_handshake(*socket, self->secret_, end_patience);
    const Accepted accepted = co_await std::move(handshake);
    if (self->on_accepted_) {
      const OnAccepted on_accepted = self->on_accepted_;  // a copy, because close() may be called
                                                          // meanwhile
      Task<> handling = on_accepted(socket, accepted);
      co_await std::move(handling);
    }
  } catch (const std::exception& error) {
    log().debug("a connection was refused: {}", error.what());
  }
  --self->handshakes_;
}

}  // namespace ziggurat
