// SPDX-License-Identifier: Apache-2.0
// collectives/self_communicator.h: one rank talking to itself: gathers copy, sums are the input.
#pragma once

#include <memory>
#include <string>

#include "collectives/communicator.h"

namespace ziggurat {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const noexcept override { return 0; }
  int world_size() const noexcept override { return 1; }

  /// In place (output is input) costs nothing.
  Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) override;
  Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                        DType dtype) override;
  Task<> all_reduce(std::span<std::byte> values, DType dtype) override;
  Task<> all_reduce(std::span<double> values, Op op) override;
  Task<> all_reduce(std::span<std::uint64_t> values, Op op) override;
  Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) override;
  Task<> broadcast(std::span<std::byte> bytes, int root) override;
  Task<> barrier() override;
  /// There is nobody else: kInvalidArgument.
  Task<> send(std::span<const std::byte> bytes, int to) override;
  Task<> recv(std::span<std::byte> bytes, int from) override;

  std::unique_ptr<Communicator> split(std::span<const int> members) override;
  std::string description() const override { return "one rank"; }
  Traffic traffic() const override;
  void abort(const std::string& reason) override;

 private:
  struct Fate {
    bool aborted = false;
    std::string reason;  // of the first abort
  };
  void check_alive() const;

  std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();  // one for all relatives by split()
};

}  // namespace ziggurat
