// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_exchange.h: what an embedder's ranks exchange among themselves, from host
// memory to host memory, in addition to what their engines exchange.
//
// Calls may come from any thread. They are numbered as they begin, in the same order on every rank,
// and several may be under way. The memory of a call belongs to the exchange until the call is
// finished.
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
  /// Opens an exchange. Every rank of `runtime` opens it, at the same place among its engines and
  /// exchanges. `runtime` must outlive it. Errors: kInvalidArgument if another rank opens one of
  /// another name in its place; those of Communicator.
  EmbeddedExchange(Runtime& runtime, std::string name);
  /// Waits for calls that are under way.
  ~EmbeddedExchange();

  std::size_t world_size() const noexcept { return world_size_; }
  /// Begins a call, and returns a number for finish(). Errors: kInvalidArgument if too many calls
  /// are not finished.
  std::uint64_t begin_all_to_all(std::span<const std::byte> input, std::span<std::byte> output);
  std::uint64_t begin_all_gather(std::span<const std::byte> input, std::span<std::byte> output);
  /// Replaces `values` by their sums over the ranks, added in the order of ranks.
  std::uint64_t begin_all_reduce(std::span<double> values);
  std::uint64_t begin_barrier();
  /// Waits until a call has ended. Errors: those of Communicator; kInvalidArgument for a number
  /// that no call has, or that was finished before.
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
