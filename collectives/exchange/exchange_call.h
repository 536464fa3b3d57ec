// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call.h: one call under way, from its announcement to its end. What
// it sends is with a MemberSender for each member, what it receives with a CallReceiver. Reactor's
// thread.
//
// Between ranks that read each other's memory: a rank that fails gives its buffers back to its
// caller, and whoever is reading them then reads what they hold next. So a reader ends its call
// only when the lender says that they were still lent when all was read.
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
  /// Chunks of one member, or of a sum: one on the wire, the rest with workers.
  static constexpr std::size_t kInFlight = 4;

  ExchangeCall(ExchangeTransport& transport, const wire::CallKey& key, const CallSpec& spec,
               Members members, ExchangePlan plan);

  void begin();
  /// A member described the call that it made; `small` is what it sends, if that is little.
  void announced(int rank, const wire::FrameHeader& header, std::span<const std::byte> small);
  std::span<std::byte> landing(int rank, const wire::FrameHeader& header);
  void chunk_arrived(int rank, const wire::FrameHeader& header);
  // Between ranks that read each other's memory.
  void results_ready(int rank, const wire::FrameHeader& header);
  void was_taken(int rank, std::uint8_t part);
  void was_kept(int rank, std::uint8_t part);
  /// Ends it when no worker has its buffers any more; nothing, if all that it waits for is its own
  /// work.
  void fail(std::exception_ptr error);
  /// A job of its own threw.
  void work_failed(const Error& error);
  void job_begins() { ++jobs_; }
  void job_ends();
  static Task<> wait(std::shared_ptr<ExchangeCall> self);

  const wire::CallKey& key() const noexcept { return key_; }
  /// Whether something of `rank` is still to come: its announcement, or also (`all`) its bytes.
  bool lacks(int rank, bool all) const;
  std::string describe() const { return ziggurat::describe(spec_, key_.sequence, *members_); }
  /// describe(), and whom it has waited for how long.
  std::string waiting() const;

  // For its senders and receivers, which live as long as it does.
  ExchangeTransport& transport() noexcept { return transport_; }
  std::size_t size() const noexcept { return members_->size(); }
  std::size_t own_place() const noexcept { return own_; }
  int rank_at(std::size_t place) const { return (*members_)[place]; }
  bool has_announced(std::size_t place) const { return peers_[place].announced; }
  /// Whether `place` reads this rank's memory, and this rank the memory of `place`.
  bool lends_to(std::size_t place) const { return peers_[place].sender.lends(); }
  bool reads_from(std::size_t place) const {
    return transport_.readable_process(rank_at(place)) != 0;
  }
  bool terms_were_kept() const { return receiver_->all_kept(); }
  wire::FrameHeader chunk_header(std::uint8_t part, std::size_t offset, std::size_t length) const;
  void tell(std::size_t place, wire::FrameKind kind, std::uint8_t part);
  Error took_what_is_not_lent() const;
  /// `work` on a worker, then `then` here, unless either finds the transport failed.
  void run_job(const char* name, std::function<void()> work, std::function<void()> then);
  /// The next three: on a worker, or where there is little.
  wire::PayloadMark mark(std::uint64_t number, std::span<const std::byte> payload,
                         std::size_t offset) const;
  /// Errors: kDataLoss for a payload that is not what `place` sent.
  void verify(std::size_t place, std::span<const std::byte> payload,
              const wire::FrameHeader& header) const;
  void read_from(std::size_t place, std::uint64_t address, std::span<std::byte> into) const;
  void moved() { transport_.moved(); }
  /// Looks whether this was the last thing that it waited for.
  void settle();

 private:
  enum class State {
    kExchanging,  ///< bytes are under way, or awaited
    kFinishing,   ///< all is there; a worker makes the result of it
    kFailing,     ///< `error_` came; workers have its buffers still
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
  std::unique_ptr<SumResults> results_;     // all_reduce
  std::unique_ptr<CallReceiver> receiver_;  // of part 0
  std::function<void()> finish_;
  State state_ = State::kExchanging;
  std::size_t jobs_ = 0;
  std::exception_ptr error_;
  Nanoseconds begun_;
  Signal done_;
};

}  // namespace ziggurat
