// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_communicator.h: ranks that exchange bytes over a simulated
// network, all on one reactor: with the bits of every other back-end, and in as much (virtual) time
// as the links would take.
//
// A call's bytes move when its last rank has come, because only then do all receivers have their
// buffers. Each rank's Task ends when its own messages have come and gone. Ranks exchange directly,
// as over TCP. A rank that never comes is noticed when nothing else is left to do. Reactor's thread
// only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/absent_memory.h"
#include "base/access_ledger.h"
#include "collectives/checked_communicator.h"
#include "collectives/exchange/frame.h"
#include "collectives/simulated/simulated_network.h"

namespace ziggurat {

class SimulatedWorld;  // the state that the ranks share

class SimulatedCommunicator final : public CheckedCommunicator {
 public:
  /// Makes one communicator per rank. Bytes in `absent` take their time and are not moved; null if
  /// there are none. `ledger` notes who reads and writes memory; null if nobody looks. Both outlive
  /// the communicators.
  static std::vector<std::unique_ptr<Communicator>> create(Reactor& reactor,
                                                           const NetworkShape& shape,
                                                           const AbsentMemory* absent = nullptr,
                                                           AccessLedger* ledger = nullptr);

  int rank() const noexcept override { return place_; }
  int world_size() const noexcept override { return static_cast<int>(members_->size()); }

  Task<> issue(const Call& call) override;
  void on_send(std::function<void(int from)> hear) override;
  std::unique_ptr<Communicator> split(std::span<const int> members) override;
  std::string description() const override { return "simulated ranks, in virtual time"; }
  Traffic traffic() const override;
  void abort(const std::string& reason) override;

 private:
  using Members = std::shared_ptr<const std::vector<int>>;
  SimulatedCommunicator(std::shared_ptr<SimulatedWorld> world, Members members, int place,
                        std::uint64_t id);

  Task<> refuse(const Error& error) override;
  /// Numbers the call among those of `lane`, and takes part in it at `place` of `members`.
  Task<> begin(const Call& call, std::uint64_t lane, const std::vector<int>& members,
               std::size_t place);

  std::shared_ptr<SimulatedWorld> world_;
  Members members_;  // ranks of the network
  int place_;
  std::uint64_t id_;
  std::map<std::uint64_t, std::uint64_t> next_sequence_;  // by lane
  std::map<std::vector<int>, std::uint64_t> splits_;      // how often each list of members was
                                                          // split off
};

}  // namespace ziggurat
