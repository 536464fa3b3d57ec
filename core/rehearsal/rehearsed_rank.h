// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_rank.h: one rank of a rehearsal: its engine on twins, and the trainer
// that plays the script. Private to core/rehearsal.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/communicator.h"
#include "core/engine/engine_tasks.h"
#include "core/rehearsal/rank_twins.h"

namespace ziggurat {

/// Lets all ranks live. Errors: rehearse()'s.
std::vector<RehearsedRank> play(RehearsedWorld& world);

class RankOnTwins : private RankTwins {
 public:
  RankOnTwins(RehearsedWorld& world, std::unique_ptr<Communicator> ranks);
  ~RankOnTwins();

  /// Opens the engine, trains, makes all steps durable and closes it. An error ends all ranks.
  Task<> live();
  /// Returns what it did, once it has lived.
  RehearsedRank take() { return std::move(its_); }

 private:
  EngineConfig watched_config();
  void watch_step(int index, const StepResult& result);
  void watch_end();
  Task<> play();
  Task<> train(int index, RehearsedStep& step);
  Task<> forward(UnitId unit, RehearsedStep& step);
  Task<> between(UnitId unit, RehearsedStep& step);
  Task<> backward(UnitId unit, bool last, RehearsedStep& step);
  Task<> acquire(UnitId unit, RehearsedStep& step);
  void release(UnitId unit);
  Task<> take_gradient(UnitId unit, RehearsedStep& step);
  Task<> compute(const char* what, UnitId unit, double seconds, RehearsedStep& step);
  bool held(UnitId unit) const;
  void tell_progress();

  double slowness_ = 1;                   // in this step
  std::unique_ptr<CostedStream> stream_;  // on which a trainer on a GPU computes; null on the CPU
  std::unique_ptr<EngineTasks> engine_;
  struct InUse {
    std::span<const std::byte> params{};
    Event landed{};  // the parameters have come
    std::span<const std::byte> gradient{};
  };
  std::vector<InUse> units_;  // what the trainer has of each
  std::uint64_t uses_ = 0;    // of units, so far
  RehearsedRank its_;
};

}  // namespace ziggurat
