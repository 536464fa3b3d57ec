// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_ranks.h: what the communicators of a rank share: its lane, the order of
// calls, and a group of NCCL's for each list of members.
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
  /// What all communicators of the same members use at NCCL.
  struct Group {
    Group(Reactor& reactor, std::unique_ptr<ExchangeCommunicator> its_sockets)
        : sockets(std::move(its_sockets)), queued(reactor), joined(reactor) {}
    void fail(const std::exception_ptr& error);

    std::unique_ptr<ExchangeCommunicator> sockets;  // for its introduction
    NcclDevice::Group number = 0;                   // the lane's
    Signal queued;                                  // what is queued now comes after its joining
    Signal joined;
  };
  /// A communicator's side of its calls, which outlive it while they are under way.
  struct Caller {
    std::shared_ptr<ExchangeCommunicator> sockets;
    std::shared_ptr<Group> group;
    std::uint64_t calls = 0;
    std::size_t under_way = 0;
  };

  /// Communicators hold the handle: when the last is gone the ranks part. On the reactor's thread,
  /// where nobody can be waited for, NCCL is aborted instead.
  static std::shared_ptr<NcclRanks> create(std::shared_ptr<ExchangeTransport> transport,
                                           ExchangeCommunicator& all,
                                           std::unique_ptr<NcclDevice> device,
                                           const NcclOptions& options);
  NcclRanks(std::shared_ptr<ExchangeTransport> transport, ExchangeCommunicator& all,
            std::unique_ptr<NcclDevice> device, const NcclOptions& options);

  ExchangeTransport& transport() noexcept { return *transport_; }
  /// For a new communicator, whose members begin to join if they are new.
  std::shared_ptr<Caller> caller(std::shared_ptr<ExchangeCommunicator> sockets);
  /// Begins now; the Task ends with it. `sent` bytes are what the operation must send; the way
  /// there is NCCL's choice.
  Task<> make(const std::shared_ptr<Caller>& caller, const Call& call, std::size_t sent);
  /// "NCCL 2.32.3 on cuda0".
  std::string description() const;
  /// What the transport says, with what goes through NCCL, and announcements as frames.
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
  std::unique_ptr<ExchangeCommunicator> all_;  // for groups, each once
  std::shared_ptr<CallOrder> order_;
  std::map<std::vector<int>, std::shared_ptr<Group>> groups_;
  std::uint64_t through_nccl_ = 0;  // bytes
  NcclLane lane_;                   // last: its thread is joined before what its jobs use is gone
};

}  // namespace ziggurat
