// SPDX-License-Identifier: Apache-2.0
// collectives/tcp/tcp_channel.h: one socket to one rank. Frames go out in the order in which they
// are given, and come in one after the other, each payload straight to its place. Reactor's thread.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/runtime/reactor.h"
#include "collectives/exchange/channel.h"
#include "collectives/exchange/exchange_transport.h"
#include "collectives/exchange/frame_seal.h"

namespace ziggurat {

using TcpSocket = boost::asio::ip::tcp::socket;

class TcpChannel final : public Channel, public std::enable_shared_from_this<TcpChannel> {
 public:
  TcpChannel(Reactor& reactor, TcpSocket socket, int peer, wire::HeaderSeal seal);
  void start(Events& events) override;
  void send(Outgoing frame) override;
  bool flushed() const noexcept override { return !writing_; }
  void finish() override;
  void close() noexcept override;

 private:
  static Task<> read_frames(std::shared_ptr<TcpChannel> self);
  static Task<> write_frames(std::shared_ptr<TcpChannel> self);
  Task<bool> read_exactly(std::span<std::byte> bytes);
  void shut_sending() noexcept;

  Reactor& reactor_;
  TcpSocket socket_;
  int peer_;
  wire::HeaderSeal seal_;
  Events* events_ = nullptr;  // null if closed or finishing
  std::deque<Outgoing> queue_;
  bool writing_ = false;
  bool finishing_ = false;
};

/// The two sockets to one rank, connected by collectives/rendezvous/rendezvous.h. The kernel ends
/// *control* kPeerGone after the peer's machine last answered; a switch fails over in less time.
/// *bulk* may stand still as long as a stopped process does.
struct TcpPeer {
  std::string host;    ///< equal for all ranks of one host
  MemoryProbe memory;  ///< the memory of a rank of this host
  /// The key of the payloads that the rank sends, if other machines could interfere. This rank has
  /// a key too.
  std::optional<wire::SealKey> payload_key;
  std::unique_ptr<TcpSocket> control;
  std::unique_ptr<TcpSocket> bulk;
  std::optional<wire::ConnectionKeys> control_keys;
  std::optional<wire::ConnectionKeys> bulk_keys;
};
inline constexpr std::chrono::seconds kPeerGone{30};

struct TcpOptions {
  int rank = 0;
  std::uint64_t epoch = 0;     ///< of this connection of all ranks, equal on all
  std::vector<TcpPeer> peers;  ///< by rank; this rank's own entry has its host and key
  Nanoseconds timeout{std::chrono::minutes(10)};  ///< ExchangeOptions::timeout
  std::shared_ptr<const void> readable;           ///< ExchangeOptions::readable
};

/// Makes channels over the sockets. Errors: errno's of setsockopt.
ExchangeOptions over_sockets(Reactor& reactor, TcpOptions options);

}  // namespace ziggurat
