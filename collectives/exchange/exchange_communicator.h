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

#include "collectives/communicator.h"
#include "collectives/exchange/exchange_transport.h"

namespace ziggurat {

class ExchangeCommunicator final : public Communicator {
 public:
  /// Of all ranks of `transport`.
  explicit ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport);

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
  std::string description() const override { return transport_->description(); }
  Traffic traffic() const override { return transport_->traffic(); }
  void abort(const std::string& reason) override;

 private:
  using Members = std::shared_ptr<const std::vector<int>>;
  ExchangeCommunicator(std::shared_ptr<ExchangeTransport> transport, Members members,
                       std::uint64_t id);

  template <class Value>
  Task<> reduce_values(std::span<Value> values, Op op, wire::Element element);
  Task<> issue(const wire::CallSpec& spec, ExchangePlan plan);
  Task<> exchange_with(int peer, const wire::CallSpec& spec, ExchangePlan plan, bool sends);
  /// Runs `check`; a call that cannot be is an error here, and the end of waiting for it elsewhere.
  template <class Check>
  std::optional<Task<>> refused(const Check& check);

  std::shared_ptr<ExchangeTransport> transport_;
  Members members_;  // ranks of the transport
  int place_ = 0;
  std::uint64_t id_ = 0;
  std::map<std::vector<int>, std::uint64_t> splits_;  // how often, by members
};

}  // namespace ziggurat
