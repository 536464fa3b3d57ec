// SPDX-License-Identifier: Apache-2.0
// collectives/checked_communicator.h: turns every operation of a Communicator into one Call and
// checks its shape. Back-ends derive from this class, and each has one function that carries out
// calls.
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
  Task<> barrier() final;
  Task<> send(std::span<const std::byte> bytes, int to) final;
  Task<> recv(std::span<std::byte> bytes, int from) final;

  /// Numbers the call and begins it; the Task ends when the call ends. Back-ends use a switch over
  /// CallSpec::kind without a default, so that the compiler finds those that lack a new kind.
  virtual Task<> issue(const Call& call) = 0;

 protected:
  /// Handles a call whose shape does not fit: fails on this rank with `error`, and ends the wait of
  /// other ranks.
  virtual Task<> refuse(const Error& error) = 0;

  /// Returns a Task that fails with `error`.
  static Task<> failing(std::exception_ptr error);
  /// Returns this rank's place in `members` of a split(). Errors: kInvalidArgument if `members` are
  /// not ascending ranks of this communicator, or lack this rank.
  int place_in(std::span<const int> members) const;

 private:
  Task<> begin(const std::string& misfit, const Call& call);
};

}  // namespace ziggurat
