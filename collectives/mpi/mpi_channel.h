// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_channel.h: channels over a cluster's MPI: a frame is a message, and control
// and bulk are two tags.
//
// MPI uses a message's bytes until it is done with them, even if their call has ended. So every
// frame is copied on its way out and in, as the kernel does for sockets. The number of bulk frames
// on their way out is limited; the rest wait in their channel.
//
// MPI adds nothing to the promises of collectives/communicator.h. The launcher handles a rank that
// died, and by default ends the others. Our timeout finds a rank that stands still. A rank that
// leaves says so itself.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/runtime/reactor.h"
#include "collectives/exchange/channel.h"
#include "collectives/exchange/exchange_transport.h"
#include "collectives/exchange/frame_seal.h"
#include "collectives/mpi/mpi_link.h"
#include "collectives/rank_options.h"

namespace ziggurat {

class MpiChannel;

/// The connection of this rank to all ranks over a link. Reactor's thread.
class MpiSession : public std::enable_shared_from_this<MpiSession> {
 public:
  static constexpr std::size_t kBulkSends = 16;  ///< the most bulk sends of this rank that MPI has
                                                 ///< at once

  MpiSession(Reactor& reactor, std::shared_ptr<MpiLink> link, int control_tag);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// Begins to receive; called once. Messages that came before are kept for it.
  void listen();
  std::shared_ptr<MpiChannel> add_channel(int peer, bool bulk, std::uint64_t epoch);
  /// Sends the frames that wait in `channel`, as far as the limit allows.
  void pump(MpiChannel& channel);
  void in_trouble() noexcept { link_->in_trouble(); }

 private:
  class Listener;
  void arrived(int from, bool bulk, const MpiMessage& message);
  void sent(int peer, bool bulk, const std::function<void()>& written);
  void failed(const std::string& why);
  std::weak_ptr<MpiChannel>& channel_of(int peer, bool bulk) {
    return channels_[2 * static_cast<std::size_t>(peer) + (bulk ? 1 : 0)];
  }

  Reactor& reactor_;
  std::shared_ptr<MpiLink> link_;
  int control_tag_;
  std::shared_ptr<Listener> listener_;
  std::vector<std::weak_ptr<MpiChannel>> channels_;  // by peer; first control, then bulk
  std::deque<std::weak_ptr<MpiChannel>> waiting_;    // channels that wait for a bulk send to end
  std::size_t bulk_sends_ = 0;
};

class MpiChannel final : public Channel, public std::enable_shared_from_this<MpiChannel> {
 public:
  MpiChannel(std::shared_ptr<MpiSession> session, int peer, bool bulk, std::uint64_t epoch);

  void start(Events& events) override;
  void send(Outgoing frame) override;
  bool flushed() const noexcept override { return queue_.empty() && in_flight_ == 0; }
  void finish() override { events_ = nullptr; }
  void close() noexcept override;

 private:
  friend MpiSession;
  void deliver(std::span<const std::byte> message);

  std::shared_ptr<MpiSession> session_;
  int peer_;
  bool bulk_;
  wire::HeaderSeal seal_;
  Events* events_ = nullptr;  // null if closed or finishing
  std::deque<Outgoing> queue_;
  std::size_t in_flight_ = 0;
};

/// Makes channels to all ranks of the job that `link` joins. Blocks until all have come. Errors:
/// kInvalidArgument if MPI and `options` disagree about ranks; kDeadlineExceeded.
ExchangeOptions over_mpi(Reactor& reactor, const std::shared_ptr<MpiLink>& link,
                         const RankOptions& options);

}  // namespace ziggurat
