// SPDX-License-Identifier: Apache-2.0
// collectives/self_communicator.h: one rank talking to itself: gathers copy, sums are the input.
#pragma once

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
  Task<> all_reduce(std::span<double> values, Op op) override;
  Task<> all_reduce(std::span<std::uint64_t> values, Op op) override;
  Task<> broadcast(std::span<std::byte> bytes, int root) override;
  Task<> barrier() override;

  void abort(const std::string& reason) override;

 private:
  void check_alive() const;

  bool aborted_ = false;
  std::string reason_;  // of the first abort
};

}  // namespace ziggurat
