// SPDX-License-Identifier: Apache-2.0
// core/engine/state/store_reshard.h: converts a store in place for another number of ranks, stage,
// tensor-parallel degree or state format. One process does this, without the trainer or the ranks;
// it must be able to reach all directories of the store.
//
// The new store is built beside the old one and replaces it when it is complete
// (tiers/store/store_succession.h). A kill at any moment leaves one of the two, and the next
// process, whether it converts or trains, continues from there. Calls block; one thread.
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
    ModelSpec model;  ///< the whole model: from the store, or from its trainer, which knows more
    std::string run_identity;  ///< EngineConfig::run_identity of the run that will use the store
    int ranks = 1;
    int tensor_parallel = 1;
    StrategyRequest strategy{};
    StateFormat format{};
    /// Chunks are as large, and as many records are under way, as a run with this host memory would
    /// have.
    std::uint64_t host_budget_bytes = 0;
    /// Called like EngineConfig::progress.
    std::function<void(const char* what, std::uint64_t done_bytes, std::uint64_t total_bytes)>
        progress{};
  };
  struct Result {
    bool changed = false;  ///< false if the store was as requested already
    std::uint64_t record_bytes = 0;
    std::vector<std::string> notes;  ///< describe what the conversion lost
  };

  /// Finishes what an earlier process left unfinished, and reads the store's description of itself.
  /// Errors: kInvalidArgument if there is no store, or if its trainer lends its parameters;
  /// kUnavailable while another process converts it; kDataLoss.
  StoreReshard(Runtime& runtime, std::vector<StoreDirectory> store);
  ~StoreReshard();
  StoreReshard(const StoreReshard&) = delete;
  StoreReshard& operator=(const StoreReshard&) = delete;

  /// Returns the store's description. run() reads it again once no other process uses the store.
  const StateContent& content() const noexcept;
  /// Returns the store's model for one rank: names, shapes and what is frozen permanently. It says
  /// how layers are divided only if the store's ranks divide them.
  ModelSpec model() const;

  /// Converts the store. Errors: kInvalidArgument if `target` does not divide or fit; kUnavailable
  /// if the store is in use; kResourceExhausted if there is no room for both stores; the drives'.
  /// After an error the old store is unchanged.
  Result run(const Target& target);

 private:
  void close() noexcept;

  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ziggurat
