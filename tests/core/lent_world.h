// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_world.h: ranks in one process that lend engines pieces of their own, a trainer
// and a store each.
#pragma once

#include <fmt/format.h>

#include <barrier>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/core/lent_trainer.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {

/// Pieces of all ranks: one element, less than a tile, a tile and more, several chunks' worth.
inline const std::vector<std::int64_t> kCounts{1, 105, 16'384, 16'385, 600'000, 7, 40'000};

/// Whose they are.
using Owners = std::vector<std::vector<UnitId>>;
inline const Owners kTwo{{1, 3, 4}, {0, 2, 5, 6}};
inline const Owners kTiny{{0, 1, 2, 3, 4, 6}, {5}};
inline const Owners kThree{{6, 0}, {5}, {1, 2, 3, 4}};

inline EngineConfig config_of(Where where, const std::string& directory) {
  EngineConfig config = small_config(directory);
  config.host_budget_bytes = 32 * kMiB;
  config.clip_norm = 0;
  config.durable_every_s = 0;
  config.placement.optimizer = where == Where::kNvme ? Tier::kNvme : Tier::kHost;
  if (where == Where::kMemory) config.store.clear();
  return config;
}

inline LentTrainer trainer_of(const std::vector<UnitId>& own) {
  return LentTrainer(lent_model(kCounts, DType::kFloat32), {}, std::nullopt, own);
}

/// Ranks of one process; each has a trainer, a directory and an engine.
class World {
 public:
  struct Rank {
    int number;
    LentTrainer& trainer;
    LentEngine& engine;
  };

  World(Owners owners, Where where) : owners_(std::move(owners)), where_(where) {
    for (const std::vector<UnitId>& own : owners_) trainers.push_back(trainer_of(own));
  }
  int size() const { return static_cast<int>(owners_.size()); }
  std::string directory(int rank) const {
    return fmt::format("{}/rank{}", directory_.path(), rank);
  }
  EngineConfig config(int rank) const {
    EngineConfig config = config_of(where_, directory(rank));
    if (host_budget_bytes != 0) config.host_budget_bytes = host_budget_bytes;
    return config;
  }

  /// Every rank opens its engine, does `body` and closes it, all together.
  std::vector<std::exception_ptr> run(const std::function<void(Rank rank)>& body) {
    const auto runtimes = connected_runtimes(size(), 2, timeout);
    std::barrier<> all_done(size());
    return run_ranks(size(), [&](int rank) {
      LentTrainer& trainer = trainers[static_cast<std::size_t>(rank)];
      auto engine = LentEngine::open(trainer.own_model(), config(rank),
                                     *runtimes[static_cast<std::size_t>(rank)], trainer.lent());
      struct Together {
        std::barrier<>& all;
        ~Together() { all.arrive_and_wait(); }
      } const leaving{all_done};
      body({.number = rank, .trainer = trainer, .engine = *engine});
    });
  }

  std::vector<LentTrainer> trainers;
  std::uint64_t host_budget_bytes = 0;  ///< of each engine; 0: config_of()'s
  Nanoseconds timeout = std::chrono::minutes(1);

 private:
  Owners owners_;
  Where where_;
  ScratchDirectory directory_;
};

/// The error of `call`, which must throw one.
template <class Call>
Error thrown_by(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorCode::kUnimplemented, "none"};
}

}  // namespace ziggurat::testing
