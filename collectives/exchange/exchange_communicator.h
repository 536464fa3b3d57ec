// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_communicator.h: ranks over channels, by direct exchange: each sends
// every other what is that one's, so a sum is made where it is owned, in rank order.
//
// Bytes sent per rank of N, n being a slice: all_gather and reduce_scatter (N - 1) n, all_reduce
// twice that, all_to_all (N - 1) n, broadcast (N - 1) n by the root: those of a ring, in one hop.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "collectives/checked_communicator.h"
#include "collectives/exchange/exchange_transport.h"

namespace ziggurat {

class ExchangeCommunicator final : public CheckedCommunicator {
 public:
  /// For all ranks of `transport`.
  explicit ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport);

  int rank() const noexcept override { return place_; }
  int world_size() const noexcept override { return static_cast<int>(members_->size()); }

  Task<> issue(const Call& call) override;
  void on_send(std::function<void(int from)> hear) override;
  std::unique_ptr<Communicator> split(std::span<const int> members) override {
    return part(members);
  }
  std::unique_ptr<ExchangeCommunicator> part(std::span<const int> members);
  /// Ranks of the transport, in order.
  const std::vector<int>& members() const noexcept { return *members_; }
  /// The same on all members, and no other communicator's.
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
  std::map<std::vector<int>, std::uint64_t> splits_;  // how often, by members
};

}  // namespace ziggurat
