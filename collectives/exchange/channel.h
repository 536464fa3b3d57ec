// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/channel.h: frames to one rank and from it, in order, by whatever carries
// bytes: sockets (tcp_channel.h) or a cluster's MPI (mpi_channel.h).
//
// There are two to each peer: *control* has announcements, small payloads and the end of all;
// *bulk* has chunks. Neither waits for the other. Reactor's thread.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "collectives/exchange/frame.h"

namespace ziggurat {

class Channel {
 public:
  /// What comes in. Two things end the channel: a bad frame (the first two functions throw an
  /// Error), and the end of the connection. Only reading sees that end, so the peer's last words
  /// come first.
  struct Events {
    /// Where the payload of `header` goes: `header.length` bytes that stay until arrived().
    virtual std::span<std::byte> landing(int peer, const wire::FrameHeader& header) = 0;
    virtual void arrived(int peer, const wire::FrameHeader& header,
                         std::span<std::byte> payload) = 0;
    /// `how` follows "rank N".
    virtual void bad_frame(int peer, const std::string& how) = 0;
    virtual void disconnected(int peer, const Channel& channel, const std::string& how) = 0;

   protected:
    ~Events() = default;
  };
  struct Outgoing {
    wire::FrameHeader header;
    std::span<const std::byte> payload;  ///< stays until written() or close()
    std::vector<std::byte> owned;        ///< or the payload itself
    std::function<void()> written;       ///< may be empty; not called after close()

    std::span<const std::byte> bytes() const noexcept { return owned.empty() ? payload : owned; }
  };

  virtual ~Channel() = default;

  /// Begins to receive.
  virtual void start(Events& events) = 0;
  virtual void send(Outgoing frame) = 0;
  /// Nothing is on its way out.
  virtual bool flushed() const noexcept = 0;
  /// What was sent goes out if the peer takes it; nothing comes in any more.
  virtual void finish() = 0;
  /// Nobody uses buffers that were given to send() when this returns.
  virtual void close() noexcept = 0;
};

}  // namespace ziggurat
