// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/simulated_communicator.h: ranks that talk over a simulated network, all of
// them on one reactor: the bits of every other back-end, in as much (virtual) time as the links
// would take.
//
// A call's bytes move when its last rank has come, which is when receivers have their buffers; each
// rank's Task ends when its own messages have come and gone. By direct exchange, as over TCP. A
// rank that never comes is found when nothing else is left to do. Reactor's thread only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/exchange/frame.h"
#include "collectives/simulated/simulated_network.h"

namespace ziggurat {

class SimulatedWorld;  // what the ranks share

class SimulatedCommunicator final : public Communicator {
 public:
  /// One for each rank.
  static std::vector<std::unique_ptr<Communicator>> create(Reactor& reactor,
                                                           const NetworkShape& shape);

  int rank() const noexcept override { return place_; }
  int world_size() const noexcept override { return static_cast<int>(members_->size()); }

  Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) override;
  Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                        DType dtype) override;
  Task<> all_reduce(std::span<std::byte> values, DType dtype) override;
  Task<> all_reduce(std::span<double> values, Op op) override;
  Task<> all_reduce(std::span<std::uint64_t> values, Op op) override;
  Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) override;
  Task<> broadcast(std::span<std::byte> bytes, int root) override;
  Task<> barrier() override;
  Task<> send(std::span<const std::byte> bytes, int to) override;
  Task<> recv(std::span<std::byte> bytes, int from) override;
  std::unique_ptr<Communicator> split(std::span<const int> members) override;
  std::string description() const override { return "simulated ranks, in virtual time"; }
  Traffic traffic() const override;
  void abort(const std::string& reason) override;

 private:
  using Members = std::shared_ptr<const std::vector<int>>;
  SimulatedCommunicator(std::shared_ptr<SimulatedWorld> world, Members members, int place,
                        std::uint64_t id);

  struct Call {
    wire::CallSpec spec;
    std::span<const std::byte> input;
    std::span<std::byte> output;
  };
  /// Numbers the call and takes part in it; `check` throws for what cannot be.
  template <class Check>
  Task<> begin(const Call& call, std::uint64_t lane, const std::vector<int>& members,
               std::size_t place, const Check& check);
  template <class Check>
  Task<> with_all(const Call& call, const Check& check);
  template <class Check>
  Task<> with_one(const Call& call, int from, int to, const Check& check);

  std::shared_ptr<SimulatedWorld> world_;
  Members members_;  // ranks of the network
  int place_;
  std::uint64_t id_;
  std::map<std::uint64_t, std::uint64_t> next_sequence_;  // by lane
  std::map<std::vector<int>, std::uint64_t> splits_;      // how often, by members
};

}  // namespace ziggurat
