// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_exchange.h: what an embedder's ranks exchange among themselves, from host
// memory to host memory, beside what its engines say.
//
// Calls may come from any thread; they are numbered as they begin, in the same order on every rank,
// and several may be under way. The memory of a call is the exchange's until it is finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "core/engine/runtime.h"

namespace ziggurat {

/// Thread-safe.
class EmbeddedExchange {
 public:
  /// Every rank of `runtime` opens it, at the same place among its engines and exchanges.
  /// `runtime` must outlive it. Errors: kInvalidArgument for a name that another rank has not given
  /// here; Communicator's.
  EmbeddedExchange(Runtime& runtime, std::string name);
  /// Waits for what is under way.
  ~EmbeddedExchange();

  std::size_t world_size() const noexcept { return world_size_; }
  /// A number for finish(). Errors: kInvalidArgument where too many calls wait for it.
  std::uint64_t begin_all_to_all(std::span<const std::byte> input, std::span<std::byte> output);
  std::uint64_t begin_all_gather(std::span<const std::byte> input, std::span<std::byte> output);
  /// In place: sums in the order of ranks.
  std::uint64_t begin_all_reduce(std::span<double> values);
  std::uint64_t begin_barrier();
  /// Waits for the call. Errors: Communicator's; kInvalidArgument for a number that is none's, or
  /// that was finished before.
  void finish(std::uint64_t ticket);

 private:
  using Make = std::function<Task<>(Communicator& ranks)>;
  std::uint64_t begin(Make make);

  Runtime& runtime_;
  const std::string name_;
  std::unique_ptr<Communicator> ranks_;
  std::size_t world_size_ = 0;
  std::mutex mutex_;
  std::uint64_t last_ticket_ = 0;
  std::map<std::uint64_t, std::future<void>> under_way_;  // by ticket
};

}  // namespace ziggurat
