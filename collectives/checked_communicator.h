// SPDX-License-Identifier: Apache-2.0
// collectives/checked_communicator.h: every operation of a Communicator as one Call whose shape
// fits. Back-ends are made from it: each has one function that carries out calls.
#pragma once

#include <exception>
#include <span>
#include <string>

#include "base/error.h"
#include "collectives/call.h"
#include "collectives/communicator.h"

namespace ziggurat {

class CheckedCommunicator : public Communicator {
 public:
  Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) final;
  Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                        DType dtype) final;
  Task<> all_reduce(std::span<std::byte> values, DType dtype) final;
  Task<> all_reduce(std::span<double> values, Op op) final;
  Task<> all_reduce(std::span<std::uint64_t> values, Op op) final;
  Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) final;
  Task<> broadcast(std::span<std::byte> bytes, int root) final;
  Task<> barrier() final;
  Task<> send(std::span<const std::byte> bytes, int to) final;
  Task<> recv(std::span<std::byte> bytes, int from) final;

  /// Numbers the call and begins it; the Task ends with it. A switch over CallSpec::kind without a
  /// default, so that the compiler finds the back-ends that lack a new kind.
  virtual Task<> issue(const Call& call) = 0;

 protected:
  /// A call whose shape does not fit: fails here with `error`, and ends the wait of other ranks.
  virtual Task<> refuse(const Error& error) = 0;

  /// A Task that fails with `error`.
  static Task<> failing(std::exception_ptr error);
  /// This rank's place in `members` of a split(). Errors: kInvalidArgument if they are not
  /// ascending ranks of this communicator, or lack this rank.
  int place_in(std::span<const int> members) const;

 private:
  Task<> begin(const std::string& misfit, const Call& call);
};

}  // namespace ziggurat
