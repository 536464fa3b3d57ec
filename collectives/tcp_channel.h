// SPDX-License-Identifier: Apache-2.0
// collectives/tcp_channel.h: one socket to one rank: frames go out in the order they are given, and
// come in one after the other, each payload straight to its place. Reactor's thread.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/runtime/reactor.h"
#include "collectives/frame.h"

namespace ziggurat {

using TcpSocket = boost::asio::ip::tcp::socket;

class TcpChannel : public std::enable_shared_from_this<TcpChannel> {
 public:
  /// What comes in. Bad frames (an Error thrown by the two first) and the end of the connection,
  /// which is seen by reading only so that the peer's last words come first, end the channel.
  struct Events {
    /// Where the payload of `header` goes: `header.length` bytes that stay until arrived().
    virtual std::span<std::byte> landing(int peer, const wire::FrameHeader& header) = 0;
    virtual void arrived(int peer, const wire::FrameHeader& header,
                         std::span<std::byte> payload) = 0;
    /// `how` follows "rank N".
    virtual void bad_frame(int peer, const std::string& how) = 0;
    virtual void disconnected(int peer, const TcpChannel& channel, const std::string& how) = 0;

   protected:
    ~Events() = default;
  };
  struct Outgoing {
    wire::FrameHeader header;
    std::span<const std::byte> payload;  ///< stays until written() or close()
    std::vector<std::byte> owned;        ///< or the payload itself
    std::function<void()> written;       ///< may be empty; not called after close()
  };

  TcpChannel(Reactor& reactor, TcpSocket socket, int peer, std::uint64_t epoch);
  /// Begins to receive.
  void start(Events& events);
  void send(Outgoing frame);
  /// Nothing is on its way out.
  bool flushed() const noexcept { return !writing_; }
  /// What was sent goes out if the peer takes it; nothing comes in any more.
  void finish();
  /// Buffers are nobody's any more when this returns.
  void close() noexcept;

 private:
  static Task<> read_frames(std::shared_ptr<TcpChannel> self);
  static Task<> write_frames(std::shared_ptr<TcpChannel> self);
  Task<bool> read_exactly(std::span<std::byte> bytes);
  void shut_sending() noexcept;

  Reactor& reactor_;
  TcpSocket socket_;
  int peer_;
  std::uint64_t epoch_;
  Events* events_ = nullptr;  // none: closed, or finishing
  std::deque<Outgoing> queue_;
  bool writing_ = false;
  bool finishing_ = false;
};

}  // namespace ziggurat
