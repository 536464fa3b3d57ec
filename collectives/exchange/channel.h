// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/channel.h: carries frames to one rank and from it, in order, over sockets
// (tcp_channel.h) or a cluster's MPI (mpi_channel.h).
//
// Each peer has two channels: *control* carries announcements, small payloads and the end of all
// calls; *bulk* carries chunks. Neither waits for the other. Reactor's thread.
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
  /// Receives what comes in. Two things end the channel: a bad frame (the first two functions throw
  /// an Error), and the end of the connection. That end is noticed only by reading, so the peer's
  /// last frames come first.
  struct Events {
    /// Returns where to receive the payload of `header`: `header.length` bytes that stay until
    /// arrived().
    virtual std::span<std::byte> landing(int peer, const wire::FrameHeader& header) = 0;
    virtual void arrived(int peer, const wire::FrameHeader& header,
                         std::span<std::byte> payload) = 0;
    /// Called for a bad frame. `how` completes a sentence that begins "rank N".
    virtual void bad_frame(int peer, const std::string& how) = 0;
    virtual void disconnected(int peer, const Channel& channel, const std::string& how) = 0;

   protected:
    ~Events() = default;
  };
  struct Outgoing {
    wire::FrameHeader header;
    std::span<const std::byte> payload;  ///< stays until written() or close()
    std::vector<std::byte> owned;        ///< the payload itself, if the channel keeps it
    std::function<void()> written;       ///< called when the frame was written, not after close();
                                         ///< may be empty

    std::span<const std::byte> bytes() const noexcept { return owned.empty() ? payload : owned; }
  };

  virtual ~Channel() = default;

  /// Begins to receive.
  virtual void start(Events& events) = 0;
  virtual void send(Outgoing frame) = 0;
  /// Returns whether no frame is on its way out.
  virtual bool flushed() const noexcept = 0;
  /// Stops receiving. Frames that were sent still go out if the peer takes them.
  virtual void finish() = 0;
  /// Closes the channel. When this returns, buffers that were given to send() are not used any
  /// more.
  virtual void close() noexcept = 0;
};

}  // namespace ziggurat
