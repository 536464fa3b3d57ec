// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_ranks.h: what the communicators of a rank share: its lane, the order of
// calls, and an NCCL group for each list of members.
//
// Reactor's thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/exchange/exchange_communicator.h"
#include "collectives/nccl/call_order.h"
#include "collectives/nccl/nccl_lane.h"

namespace ziggurat {

class NcclRanks : public std::enable_shared_from_this<NcclRanks> {
 public:
  /// The NCCL group that all communicators of the same members use.
  struct Group {
    Group(Reactor& reactor, std::unique_ptr<ExchangeCommunicator> its_sockets)
        : sockets(std::move(its_sockets)), queued(reactor), joined(reactor) {}
    void fail(const std::exception_ptr& error);

    std::unique_ptr<ExchangeCommunicator> sockets;  // used to introduce the members
    NcclDevice::Group number = 0;                   // number of the group in the lane
    Signal queued;                                  // set once jobs that are queued now come after
                                                    // the group's joining
    Signal joined;
  };
  /// A communicator's part in its calls. Calls under way keep it after the communicator is gone.
  struct Caller {
    std::shared_ptr<ExchangeCommunicator> sockets;
    std::shared_ptr<Group> group;
    std::uint64_t calls = 0;
    std::size_t under_way = 0;
  };

  /// Makes the object that communicators share: when the last of them is gone, the ranks part. If
  /// that happens on the reactor's thread, which must not wait, NCCL is aborted instead.
  static std::shared_ptr<NcclRanks> create(std::shared_ptr<ExchangeTransport> transport,
                                           ExchangeCommunicator& all,
                                           std::unique_ptr<NcclDevice> device,
                                           const NcclOptions& options);
  NcclRanks(std::shared_ptr<ExchangeTransport> transport, ExchangeCommunicator& all,
            std::unique_ptr<NcclDevice> device, const NcclOptions& options);

  ExchangeTransport& transport() noexcept { return *transport_; }
  /// Returns the caller of a new communicator. Its members begin to join if they are a new list.
  std::shared_ptr<Caller> caller(std::shared_ptr<ExchangeCommunicator> sockets);
  /// Begins a call; the Task ends when the call ends. The operation must send `sent` bytes; NCCL
  /// chooses the way.
  Task<> make(const std::shared_ptr<Caller>& caller, const Call& call, std::size_t sent);
  /// Describes library and GPU: "NCCL 2.32.3 on cuda0".
  std::string description() const;
  /// Returns the transport's traffic, with the bytes through NCCL, and announcements counted as
  /// frames.
  Traffic traffic() const;

 private:
  struct Introduction;
  struct Issued;

  static Task<> part(std::shared_ptr<NcclRanks> self);
  static Task<> join(std::shared_ptr<NcclRanks> self, std::shared_ptr<Group> group);
  static Task<> introduce(std::shared_ptr<NcclRanks> self, std::shared_ptr<Group> group,
                          std::shared_ptr<std::vector<Introduction>> all);
  void require_compatible(const Group& group, const std::vector<Introduction>& all) const;
  static Task<> carry_out(std::shared_ptr<NcclRanks> self, std::shared_ptr<Issued> call,
                          Task<> told);
  static Task<> run(std::shared_ptr<NcclRanks> self, std::shared_ptr<Issued> call, Task<> told);
  static Task<> end_of(std::shared_ptr<Issued> call);
  void require_agreement(const Issued& call) const;
  static Task<> wait_for_news(std::shared_ptr<NcclRanks> self, ErrorCode code);
  [[noreturn]] void fail(const Error& error, const std::string& what);
  void give_up();

  std::shared_ptr<ExchangeTransport> transport_;
  NcclOptions options_;
  std::shared_ptr<AnnouncedBytes> announced_;
  std::unique_ptr<ExchangeCommunicator> all_;  // all ranks, from which groups are split off, each
                                               // once
  std::shared_ptr<CallOrder> order_;
  std::map<std::vector<int>, std::shared_ptr<Group>> groups_;
  std::uint64_t through_nccl_ = 0;  // bytes
  NcclLane lane_;                   // last, so that its thread is joined before the members that
                                    // its jobs use are destroyed
};

}  // namespace ziggurat
