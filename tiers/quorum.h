// SPDX-License-Identifier: Apache-2.0
// tiers/quorum.h: the little that a store needs to agree with the stores of other ranks. core/
// adapts a Communicator to it; tiers/ stands below collectives/ and cannot use one.
#pragma once

#include <cstdint>
#include <exception>

#include "base/error.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

/// What a rank throws where nothing failed on its own part, but on another rank's of the same work.
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
  /// Smallest and largest `value` over ranks; every rank calls in the same order.
  virtual Task<std::uint64_t> min(std::uint64_t value) = 0;
  virtual Task<std::uint64_t> max(std::uint64_t value) = 0;
  virtual Task<> barrier() = 0;
};

/// Runs `mine`, then learns whether every rank's succeeded (so it is a barrier too), so that no
/// rank is left waiting for one that gave up. Throws this rank's own error, or PeerFailed
/// (kUnavailable) saying `what` failed elsewhere.
Task<> together(Quorum& ranks, Task<> mine, const char* what);

/// One rank agrees with itself.
class SoloQuorum final : public Quorum {
 public:
  int rank() const noexcept override { return 0; }
  int world_size() const noexcept override { return 1; }
  Task<std::uint64_t> min(std::uint64_t value) override { co_return value; }
  Task<std::uint64_t> max(std::uint64_t value) override { co_return value; }
  Task<> barrier() override { co_return; }
};

}  // namespace ziggurat
