// SPDX-License-Identifier: Apache-2.0
// core/engine/store_reshard.h: a store cut anew in its own place by one process, for whatever ranks
// shall open it next: another number of them, another stage, tensor-parallel degree or state
// format. Neither its trainer nor its ranks are needed; all its directories must be in reach.
//
// The new store is built beside the old one and takes its place when it is whole
// (tiers/store_succession.h): a kill at any moment leaves one of the two, and what comes next, this
// or a training run, goes on from there. Blocks; one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/state_content.h"
#include "core/engine/engine_config.h"
#include "core/engine/runtime.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

class StoreReshard {
 public:
  struct Target {
    ModelSpec model;           ///< whole: the store's own, or its trainer's that says more
    std::string run_identity;  ///< EngineConfig::run_identity of the run that shall go on
    int ranks = 1;
    int tensor_parallel = 1;
    StrategyRequest strategy{};
    StateFormat format{};
    /// Chunks are cut, and records are under way, as a run with so much host memory wants them.
    std::uint64_t host_budget_bytes = 0;
    /// As EngineConfig::progress.
    std::function<void(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes)>
        progress{};
  };
  struct Result {
    bool changed = false;  ///< false: it was so already
    std::uint64_t record_bytes = 0;
    std::vector<std::string> notes;  ///< what converting lost
  };

  /// Ends what an earlier process left, and reads what the store says of itself. Errors:
  /// kInvalidArgument where there is none, or its trainer lends its parameters; kUnavailable while
  /// another process builds; kDataLoss.
  StoreReshard(Runtime& runtime, std::vector<StoreDirectory> store);
  ~StoreReshard();
  StoreReshard(const StoreReshard&) = delete;
  StoreReshard& operator=(const StoreReshard&) = delete;

  /// Until run(), which looks again once nobody else has the store.
  const StateContent& content() const noexcept;
  /// The store's, of one rank: names, shapes and what is frozen for good. How layers divide it
  /// knows only where they are divided.
  ModelSpec model() const;

  /// Errors: kInvalidArgument for what does not divide or fit; kUnavailable where the store is in
  /// use; kResourceExhausted where there is no room for both; the drives'. The old store stands
  /// then, as it was.
  Result run(const Target& target);

 private:
  void close() noexcept;

  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ziggurat
