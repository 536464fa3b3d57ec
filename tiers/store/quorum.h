// SPDX-License-Identifier: Apache-2.0
// tiers/store/quorum.h: the few operations that a store needs to agree with the stores of other
// ranks. core/ implements them with a Communicator; tiers/ cannot use one, because it is below
// collectives/.
#pragma once

#include <cstdint>
#include <exception>

#include "base/error.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

/// The error of a rank whose own part of the work succeeded while another rank's failed.
class PeerFailed : public Error {
 public:
  using Error::Error;
};
inline bool followed_from_another(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const PeerFailed&) {
    return true;
  } catch (...) {
  }
  return false;
}

class Quorum {
 public:
  virtual ~Quorum() = default;
  virtual int rank() const noexcept = 0;
  virtual int world_size() const noexcept = 0;
  /// Returns the smallest, or largest, `value` over ranks; all ranks make the same calls in the
  /// same order.
  virtual Task<std::uint64_t> min(std::uint64_t value) = 0;
  virtual Task<std::uint64_t> max(std::uint64_t value) = 0;
  virtual Task<> barrier() = 0;
};

/// Runs `mine`, then learns whether every rank's work succeeded, so that no rank waits for one that
/// gave up; this is a barrier too. Throws this rank's own error, or PeerFailed (kUnavailable),
/// which says that `what` failed on another rank.
Task<> together(Quorum& ranks, Task<> mine, const char* what);

/// The quorum of a single rank.
class SoloQuorum final : public Quorum {
 public:
  int rank() const noexcept override { return 0; }
  int world_size() const noexcept override { return 1; }
  Task<std::uint64_t> min(std::uint64_t value) override { co_return value; }
  Task<std::uint64_t> max(std::uint64_t value) override { co_return value; }
  Task<> barrier() override { co_return; }
};

}  // namespace ziggurat
