// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call.h: one call under way, from its announcement to its end. A
// MemberSender per member sends, and a CallReceiver receives. Reactor's thread.
//
// Some ranks read each other's memory. If a rank fails, it gives its buffers back to its caller,
// and a rank that is still reading them may read other bytes. So a reader ends its call only when
// the lender says that the buffers were still lent when all was read.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/runtime/async.h"
#include "collectives/exchange/call_plan.h"
#include "collectives/exchange/call_receiver.h"
#include "collectives/exchange/exchange_transport.h"
#include "collectives/exchange/frame.h"
#include "collectives/exchange/member_sender.h"
#include "collectives/exchange/sum_results.h"

namespace ziggurat {

class ExchangeCall : public std::enable_shared_from_this<ExchangeCall> {
 public:
  using Members = std::shared_ptr<const std::vector<int>>;
  /// The most chunks in flight for one member or one sum: one on the wire, the rest with workers.
  static constexpr std::size_t kInFlight = 4;

  ExchangeCall(ExchangeTransport& transport, const wire::CallKey& key, const CallSpec& spec,
               Members members, ExchangePlan plan);

  void begin();
  /// Handles the announcement of a member. `small` has the member's bytes if they are few.
  void announced(int rank, const wire::FrameHeader& header, std::span<const std::byte> small);
  std::span<std::byte> landing(int rank, const wire::FrameHeader& header);
  void chunk_arrived(int rank, const wire::FrameHeader& header);
  // Called between ranks that read each other's memory.
  void results_ready(int rank, const wire::FrameHeader& header);
  void was_taken(int rank, std::uint8_t part);
  void was_kept(int rank, std::uint8_t part);
  /// Fails the call; it ends when no worker uses its buffers any more. Does nothing if the call
  /// waits only for its own work.
  void fail(std::exception_ptr error);
  /// Fails the call because one of its own jobs threw.
  void work_failed(const Error& error);
  void job_begins() { ++jobs_; }
  void job_ends();
  static Task<> wait(std::shared_ptr<ExchangeCall> self);

  const wire::CallKey& key() const noexcept { return key_; }
  /// Returns whether something of `rank` is still to come: its announcement or, with `all`, its
  /// bytes.
  bool lacks(int rank, bool all) const;
  std::string describe() const { return ziggurat::describe(spec_, key_.sequence, *members_); }
  /// Returns describe() and which ranks the call has waited for, and how long.
  std::string waiting() const;

  // The functions from here on are for the call's senders and receivers, which live as long as it
  // does.
  ExchangeTransport& transport() noexcept { return transport_; }
  std::size_t size() const noexcept { return members_->size(); }
  std::size_t own_place() const noexcept { return own_; }
  int rank_at(std::size_t place) const { return (*members_)[place]; }
  bool has_announced(std::size_t place) const { return peers_[place].announced; }
  /// Returns whether `place` reads this rank's memory; reads_from() says whether this rank reads
  /// the memory of `place`.
  bool lends_to(std::size_t place) const { return peers_[place].sender.lends(); }
  bool reads_from(std::size_t place) const {
    return transport_.readable_process(rank_at(place)) != 0;
  }
  bool terms_were_kept() const { return receiver_->all_kept(); }
  wire::FrameHeader chunk_header(std::uint8_t part, std::size_t offset, std::size_t length) const;
  void tell(std::size_t place, wire::FrameKind kind, std::uint8_t part);
  Error took_what_is_not_lent() const;
  /// Runs `work` on a worker, then `then` on the reactor's thread, unless the transport has failed
  /// before either.
  void run_job(const char* name, std::function<void()> work, std::function<void()> then);
  /// Returns the mark of a payload. This and the next two functions run on a worker, or on any
  /// thread for a few bytes.
  wire::PayloadMark mark(std::uint64_t number, std::span<const std::byte> payload,
                         std::size_t offset) const;
  /// Checks a payload. Errors: kDataLoss if it is not what `place` sent.
  void verify(std::size_t place, std::span<const std::byte> payload,
              const wire::FrameHeader& header) const;
  void read_from(std::size_t place, std::uint64_t address, std::span<std::byte> into) const;
  void moved() { transport_.moved(); }
  /// Ends the call if it waits for nothing any more.
  void settle();

 private:
  enum class State {
    kExchanging,  ///< bytes are under way or awaited
    kFinishing,   ///< all bytes are there; a worker makes the result of them
    kFailing,     ///< the call has `error_`; workers still use its buffers
    kEnded
  };
  struct Peer {
    bool announced = false;
    MemberSender sender;
  };

  std::optional<std::size_t> find_place(int rank) const;
  std::size_t place_of(int rank) const;
  void announce(std::size_t place);
  CallReceiver* receiver_of(std::uint8_t part);
  bool exchanged() const;
  void end();

  ExchangeTransport& transport_;
  wire::CallKey key_;
  CallSpec spec_;
  Members members_;
  std::size_t own_ = 0;
  std::vector<Peer> peers_;                 // by place
  std::unique_ptr<SumResults> results_;     // for all_reduce only
  std::unique_ptr<CallReceiver> receiver_;  // receives part 0 of the call
  std::function<void()> finish_;
  State state_ = State::kExchanging;
  std::size_t jobs_ = 0;
  std::exception_ptr error_;
  Nanoseconds begun_;
  Signal done_;
};

}  // namespace ziggurat
