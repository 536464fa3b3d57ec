// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_communicator.h: ranks over channels, by direct exchange: each rank
// sends every other rank its part directly. So a sum is made by the rank that owns it, in rank
// order.
//
// Bytes sent per rank of N, where n is a slice: all_gather and reduce_scatter (N - 1) n, all_reduce
// twice that, all_to_all (N - 1) n. A ring sends as many, but not in one hop.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "collectives/checked_communicator.h"
#include "collectives/exchange/exchange_transport.h"

namespace ziggurat {

class ExchangeCommunicator final : public CheckedCommunicator {
 public:
  /// Makes the communicator of all ranks of `transport`.
  explicit ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport);

  int rank() const noexcept override { return place_; }
  int world_size() const noexcept override { return static_cast<int>(members_->size()); }

  Task<> issue(const Call& call) override;
  void on_send(std::function<void(int from)> hear) override;
  std::unique_ptr<Communicator> split(std::span<const int> members) override {
    return part(members);
  }
  std::unique_ptr<ExchangeCommunicator> part(std::span<const int> members);
  /// Returns the members as ranks of the transport, in order.
  const std::vector<int>& members() const noexcept { return *members_; }
  /// Returns a number that is equal on all members and different for every communicator.
  std::uint64_t id() const noexcept { return id_; }
  std::string description() const override { return transport_->description(); }
  Traffic traffic() const override { return transport_->traffic(); }
  void abort(const std::string& reason) override;

 private:
  using Members = std::shared_ptr<const std::vector<int>>;
  ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport, Members members,
                       std::uint64_t id);

  Task<> refuse(const Error& error) override;

  std::shared_ptr<ExchangeTransport> transport_;
  Members members_;  // ranks of the transport
  int place_ = 0;
  std::uint64_t id_ = 0;
  std::map<std::vector<int>, std::uint64_t> splits_;  // how often each list of members was split
                                                      // off
};

}  // namespace ziggurat
