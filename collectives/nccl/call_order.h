// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/call_order.h: one order for the calls of all NCCL communicators of all ranks.
//
// A GPU runs NCCL's calls one after the other, so a call that waits for another rank delays all
// that come after it. If two ranks have two calls in different orders, both wait for ever. So the
// first member of a call asks rank 0 for a turn when all members have announced the call. Rank 0
// gives turns one after the other, and tells the members of each. Every rank sees a part of one
// order, in which every call can end. The cost is two small frames in a row per call, or one if the
// first member is rank 0. Rejected: to agree by numbers alone, without rank 0. A call would have to
// wait for earlier ones that another rank has not made yet, and may not make before this one ends.
//
// Reactor's thread.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/runtime/async.h"
#include "collectives/exchange/exchange_communicator.h"

namespace ziggurat {

/// Counts the bytes that announce calls, apart from those of the calls themselves.
class AnnouncedBytes {
 public:
  explicit AnnouncedBytes(const ExchangeTransport& transport) : transport_(&transport) {}
  /// Counts what `issue()` sends. It sends so little that all of it is counted when `issue()`
  /// returns.
  template <class Issue>
  Task<> of(const Issue& issue) {
    const Traffic before = transport_->traffic();
    Task<> issued = issue();
    const Traffic& after = transport_->traffic();
    same_host += after.same_host.payload_bytes - before.same_host.payload_bytes;
    other_hosts += after.other_hosts.payload_bytes - before.other_hosts.payload_bytes;
    return issued;
  }

  std::uint64_t same_host = 0;
  std::uint64_t other_hosts = 0;

 private:
  const ExchangeTransport* transport_;
};

class CallOrder : public std::enable_shared_from_this<CallOrder> {
 public:
  struct Key {
    std::uint64_t communicator = 0;
    std::uint64_t sequence = 0;
    auto operator<=>(const Key&) const = default;
  };

  /// `control` has all ranks, is used for nothing else, and outlasts goodbyes: rank 0 gives turns
  /// until no rank makes calls any more.
  CallOrder(Reactor& reactor, std::unique_ptr<ExchangeCommunicator> control,
            std::shared_ptr<AnnouncedBytes> announced);
  /// Begins to receive. Called before every other function.
  void listen();
  std::uint64_t communicator() const noexcept { return control_->id(); }

  /// Notes that this rank makes the call and waits for its turn from now on.
  void expect(const Key& key);
  /// Asks for a turn. The call's first member does this once, when all have announced the call.
  /// `members` are ranks of `control`.
  void ask(const Key& key, std::span<const int> members);
  /// Waits for the turn. The caller must then call taken(), because all other calls wait for that.
  Task<> turn(const Key& key);
  void taken(const Key& key);
  /// Fails everything that waits: no turn comes any more.
  void fail(const std::exception_ptr& error);

 private:
  static Task<> read_turns(std::shared_ptr<CallOrder> self);
  static Task<> read_asks(std::shared_ptr<CallOrder> self, int from);
  static Task<> tell(std::shared_ptr<CallOrder> self, std::shared_ptr<std::vector<std::uint64_t>>,
                     int to);
  void spawn(Task<> task);
  void give(const Key& key, std::span<const std::uint64_t> members);
  void came(const Key& key);
  std::size_t words_of_ask() const;

  Reactor& reactor_;
  std::unique_ptr<ExchangeCommunicator> control_;
  std::shared_ptr<AnnouncedBytes> announced_;
  std::map<Key, Signal> expected_;
  std::deque<Key> turns_;             // given and not taken yet, in order
  std::size_t turns_to_come_ = 0;     // turns that rank 0 is still to give
  bool reading_ = false;              // whether turns are being read
  std::vector<std::size_t> asks_of_;  // on rank 0: questions heard of and not read, by rank
  std::exception_ptr failure_;
};

}  // namespace ziggurat
