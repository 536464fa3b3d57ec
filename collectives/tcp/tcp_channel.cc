// SPDX-License-Identifier: Apache-2.0
// collectives/tcp/tcp_channel.cc: one coroutine reads, and one writes while there are frames to
// send.
#include "collectives/tcp/tcp_channel.h"

#include <fmt/format.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "base/error.h"

namespace ziggurat {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

// Several probes, because a spanning tree that converges again, or a bond that changes its link,
// takes a few seconds.
constexpr int kProbes = 5;
constexpr int kProbeSeconds = static_cast<int>(kPeerGone.count()) / (kProbes + 1);

void set_option(TcpSocket& socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket.native_handle(), level, option, &value, sizeof(value)) != 0) {
    throw system_error(
        errno, fmt::format("cannot set {} on a connection between ranks (setsockopt)", name));
  }
}

/// Makes the kernel notice a peer that does not answer after kPeerGone, idle or not.
void keep_alive(TcpSocket& socket) {
  constexpr int kPeerGoneMs = static_cast<int>(std::chrono::milliseconds(kPeerGone).count());
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, kProbeSeconds, "TCP_KEEPIDLE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds, "TCP_KEEPINTVL");
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes, "TCP_KEEPCNT");
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kPeerGoneMs, "TCP_USER_TIMEOUT");
}

/// Reads as much as is asked for at once, because Asio's own condition stops at 64 KiB per system
/// call.
std::size_t whole(const error_code& error, std::size_t) {
  return error ? 0 : wire::kChunkBytes + sizeof(wire::FrameHeader);
}

std::string in_words(const error_code& error) {
  if (error == asio::error::eof) return "is gone: it closed its connection without saying why";
  return fmt::format("is gone: {}", errno_text(error.value()));
}

}  // namespace

TcpChannel::TcpChannel(Reactor& reactor, TcpSocket socket, int peer, wire::HeaderSeal seal)
    : reactor_(reactor), socket_(std::move(socket)), peer_(peer), seal_(std::move(seal)) {}

void TcpChannel::start(Events& events) {
  events_ = &events;
  asio::co_spawn(reactor_.context(), read_frames(shared_from_this()), asio::detached);
}

void TcpChannel::send(Outgoing frame) {
  if (events_ == nullptr) return;
  seal_.seal(frame.header);
  queue_.push_back(std::move(frame));
  if (writing_) return;
  writing_ = true;
  asio::co_spawn(reactor_.context(), write_frames(shared_from_this()), asio::detached);
}

void TcpChannel::finish() {
  events_ = nullptr;
  finishing_ = true;
  if (!writing_) shut_sending();
}

void TcpChannel::shut_sending() noexcept {
  error_code ignored;  // a peer that is gone already needs no goodbye
  socket_.shutdown(TcpSocket::shutdown_send, ignored);
}

void TcpChannel::close() noexcept {
  events_ = nullptr;
  queue_.clear();
  error_code ignored;  // the socket is released whatever close() returns
  socket_.close(ignored);
}

Task<bool> TcpChannel::read_exactly(std::span<std::byte> bytes) {
  error_code error;
  co_await asio::async_read(socket_, asio::buffer(bytes.data(), bytes.size()), whole,
                            asio::redirect_error(asio::use_awaitable, error));
  if (events_ == nullptr) co_return false;
  if (!error) co_return true;
  std::exchange(events_, nullptr)->disconnected(peer_, *this, in_words(error));
  co_return false;
}

Task<> TcpChannel::read_frames(std::shared_ptr<TcpChannel> self) {
  wire::FrameHeader header;
  for (;;) {
    if (!co_await self->read_exactly(std::as_writable_bytes(std::span(&header, 1)))) co_return;
    std::span<std::byte> payload;
    std::string fault;
    try {
      self->seal_.check(header);
      payload = self->events_->landing(self->peer_, header);
    } catch (const Error& error) {
      fault = error.what();
    }
    if (fault.empty() && !payload.empty()) {
      if (!co_await self->read_exactly(payload)) co_return;
    }
    try {
      if (fault.empty()) self->events_->arrived(self->peer_, header, payload);
    } catch (const Error& error) {
      fault = error.what();
    }
    if (self->events_ == nullptr) co_return;
    if (!fault.empty()) {
      std::exchange(self->events_, nullptr)->bad_frame(self->peer_, fault);
      co_return;
    }
  }
}

Task<> TcpChannel::write_frames(std::shared_ptr<TcpChannel> self) {
  while (!self->queue_.empty()) {
    Outgoing frame = std::move(self->queue_.front());
    self->queue_.pop_front();
    const std::span<const std::byte> payload = frame.bytes();
    const std::array<asio::const_buffer, 2> both{asio::buffer(&frame.header, sizeof(frame.header)),
                                                 asio::buffer(payload.data(), payload.size())};
    error_code error;
    co_await asio::async_write(self->socket_, both, whole,
                               asio::redirect_error(asio::use_awaitable, error));
    if (error) {  // the reading coroutine reports it
      self->queue_.clear();
      break;
    }
    if (frame.written && self->events_ != nullptr) frame.written();
  }
  self->writing_ = false;
  if (self->finishing_) self->shut_sending();
}

ExchangeOptions over_sockets(Reactor& reactor, TcpOptions options) {
  ExchangeOptions exchange;
  exchange.rank = options.rank;
  exchange.carrier = "sockets";
  exchange.timeout = options.timeout;
  exchange.readable = std::move(options.readable);
  for (std::size_t i = 0; i < options.peers.size(); ++i) {
    TcpPeer& from = options.peers[i];
    ExchangePeer& to = exchange.peers.emplace_back(from.host, from.memory);
    to.payloads = wire::PayloadSeal(from.payload_key);
    const int peer = static_cast<int>(i);
    if (peer == options.rank) continue;
    for (TcpSocket* socket : {from.control.get(), from.bulk.get()}) {
      set_option(*socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
    }
    keep_alive(*from.control);
    to.control = std::make_shared<TcpChannel>(reactor, std::move(*from.control), peer,
                                              wire::HeaderSeal(options.epoch, from.control_keys));
    to.bulk = std::make_shared<TcpChannel>(reactor, std::move(*from.bulk), peer,
                                           wire::HeaderSeal(options.epoch, from.bulk_keys));
  }
  return exchange;
}

}  // namespace ziggurat
