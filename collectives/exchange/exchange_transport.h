// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_transport.h: the channels from this rank to all others, and the
// calls under way.
//
// The channels alone know what carries the frames (collectives/exchange/channel.h), so bits, checks
// and the order of calls are the same on all carriers. The first error on any rank is sent to all
// ranks and fails every call on every rank. Reactor's thread.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/runtime/worker_pool.h"
#include "collectives/communicator.h"
#include "collectives/exchange/channel.h"
#include "collectives/exchange/frame_seal.h"
#include "collectives/exchange/patience.h"
#include "collectives/exchange/peer_memory.h"

namespace ziggurat {

class ExchangeCall;
struct ExchangePlan;

struct ExchangePeer {
  std::string host;            ///< equal for all ranks of one host
  MemoryProbe memory;          ///< the memory of a rank of this host; if none, frames are used for
                               ///< this rank too
  wire::PayloadSeal payloads;  ///< seals the payloads that the rank sends
  std::shared_ptr<Channel> control;
  std::shared_ptr<Channel> bulk;
};

struct ExchangeOptions {
  int rank = 0;
  std::string carrier;              ///< what carries the frames: "sockets"
  std::vector<ExchangePeer> peers;  ///< by rank; this rank's own entry has its host and its seal
  /// How long all ranks may stand still before calls fail with kDeadlineExceeded; patience.h
  /// defines standing still. Channels notice a rank that is gone.
  Nanoseconds timeout{std::chrono::minutes(10)};
  std::shared_ptr<const void> readable;  ///< from allow_reading(), if ranks of this host may read
                                         ///< this one
};

class ExchangeTransport final : public Channel::Events,
                                public std::enable_shared_from_this<ExchangeTransport> {
 public:
  /// Makes a transport. Communicators share it: calls that are still under way fail when the last
  /// communicator is gone.
  static std::shared_ptr<ExchangeTransport> create(Reactor& reactor, WorkerPool& workers,
                                                   ExchangeOptions options);
  ExchangeTransport(Reactor& reactor, WorkerPool& workers, ExchangeOptions options);
  ~ExchangeTransport();

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return static_cast<int>(peers_.size()); }
  Reactor& reactor() noexcept { return reactor_; }
  const Traffic& traffic() const noexcept { return traffic_; }
  /// Names what carries calls: "each other's memory within a host, sockets".
  std::string description() const;

  /// Numbers a call of `members` (ranks of this transport) and begins it.
  Task<> issue(std::uint64_t communicator, std::uint64_t lane, const CallSpec& spec,
               std::shared_ptr<const std::vector<int>> members, ExchangePlan plan);
  /// Runs `hear` with the lane of each send() on a communicator that comes before its recv(), now
  /// or later. An empty `hear` ends this.
  void on_send(std::uint64_t communicator, std::function<void(std::uint64_t lane)> hear);
  /// Handles the first error: tells all ranks and fails every call of this one.
  void fail(ErrorCode code, const std::string& text);
  bool failed() const noexcept { return failure_.has_value(); }
  const std::optional<Error>& failure() const noexcept { return failure_; }
  /// Runs `hear` when the transport fails, before the calls do.
  void on_failure(std::function<void()> hear) { hear_failure_.push_back(std::move(hear)); }
  bool on_one_host() const noexcept;
  bool on_this_host(int rank) const noexcept { return rank == rank_ || of(rank).same_host; }
  /// Says goodbye: this rank makes no more calls. Ends with true when all others have said goodbye,
  /// with false after `most`, or with the transport's failure. Calls that outlast goodbyes go on
  /// until it ends.
  static Task<bool> part(std::shared_ptr<ExchangeTransport> self, Nanoseconds most);
  /// Lets calls of `communicator` go on after goodbyes, because they serve ranks that still make
  /// calls.
  void outlast(std::uint64_t communicator) { outlasting_.insert(communicator); }

  // The functions from here on are used by calls.
  void send_control(int to, wire::FrameHeader header, std::span<const std::byte> payload);
  void send_bulk(int to, wire::FrameHeader header, std::span<const std::byte> payload,
                 std::function<void()> written);
  /// Runs `work` on a worker, then `then` on the reactor's thread, unless the transport has failed
  /// before either.
  void run_job(const std::shared_ptr<ExchangeCall>& call, const char* name,
               std::function<void()> work, std::function<void()> then);
  void ended(ExchangeCall& call);
  /// Notes that a call made progress.
  void moved() noexcept { patience_.moved(); }
  /// Returns the number of the next payload that goes out, to whichever rank.
  std::uint64_t next_payload() noexcept { return payloads_++; }
  /// Returns the seal of the payloads that `rank` sends.
  const wire::PayloadSeal& seal_of(int rank) const noexcept {
    return peers_[static_cast<std::size_t>(rank)].payloads;
  }
  const wire::PayloadSeal& own_seal() const noexcept { return seal_of(rank_); }
  void waited(int for_rank, Nanoseconds time) {
    traffic_.waited[static_cast<std::size_t>(for_rank)] += time;
  }
  /// Returns the process of a rank of this host whose memory can be read, or 0 if bytes must be
  /// sent.
  std::int64_t readable_process(int rank) const noexcept {
    return peers_[static_cast<std::size_t>(rank)].process;
  }
  /// Counts `bytes` of this rank's memory that `to` has read.
  void count_taken(int to, std::size_t bytes) { sent_to(to).payload_bytes += bytes; }
  /// Takes a buffer of wire::kChunkBytes.
  std::unique_ptr<std::byte[]> take_buffer();
  void return_buffer(std::unique_ptr<std::byte[]> buffer);

 private:
  /// How long to wait for the last frames of a peer that goes away.
  static constexpr Nanoseconds kLastWords = std::chrono::milliseconds(300);

  struct Peer {
    std::shared_ptr<Channel> control;  // null for this rank
    std::shared_ptr<Channel> bulk;
    bool same_host = false;
    std::int64_t process = 0;
    wire::PayloadSeal payloads;
    bool left = false;             // the rank said goodbye
    std::vector<std::byte> small;  // receives payloads of control frames
  };
  struct CallName {
    CallSpec spec;
    std::uint64_t sequence = 0;
    std::shared_ptr<const std::vector<int>> members;
  };
  struct Early {
    wire::FrameHeader header;
    std::vector<std::byte> payload;
  };

  std::span<std::byte> landing(int peer, const wire::FrameHeader& header) override;
  void arrived(int peer, const wire::FrameHeader& header, std::span<std::byte> payload) override;
  void bad_frame(int peer, const std::string& how) override;
  void disconnected(int peer, const Channel& channel, const std::string& how) override;

  void start();
  void say_goodbye();
  void close();
  static Task<> close_and_flush(std::shared_ptr<ExchangeTransport> self);
  void watch();
  void tick_later();
  void tick();
  void alive(int peer, const wire::FrameHeader& header);
  void announced(int peer, const wire::FrameHeader& header, std::span<std::byte> payload);
  void about_memory(int peer, const wire::FrameHeader& header);
  void peer_aborted(int peer, const wire::FrameHeader& header, std::span<std::byte> payload);
  bool outlasts(std::uint64_t communicator) const { return outlasting_.contains(communicator); }
  void fail_calls_without(int peer);
  void fail_after_last_words(const std::string& text);
  void stop(ErrorCode code, const std::string& text);
  std::string with_pending(const std::string& text) const;
  Traffic::Sent& sent_to(int rank) noexcept;
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& of(int rank) const noexcept { return peers_[static_cast<std::size_t>(rank)]; }

  Reactor& reactor_;
  WorkerPool& workers_;
  int rank_;
  std::string carrier_;
  std::shared_ptr<const void> readable_;
  Patience patience_;
  std::uint64_t payloads_ = 0;
  std::vector<Peer> peers_;
  std::map<wire::CallKey, std::shared_ptr<ExchangeCall>> calls_;
  bool watching_ = false;
  bool said_goodbye_ = false;
  std::set<std::uint64_t> outlasting_;  // numbers of communicators
  std::map<wire::CallKey, std::vector<Early>> early_;
  std::size_t early_count_ = 0;
  std::map<std::uint64_t, std::function<void(std::uint64_t lane)>> hear_sends_;  // by communicator
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> next_sequence_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;
  std::deque<CallName> record_;  // the last calls, for the log
  Traffic traffic_;
  std::optional<Error> failure_;
  std::vector<std::function<void()>> hear_failure_;
};

}  // namespace ziggurat
