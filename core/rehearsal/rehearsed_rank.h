// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_rank.h: one rank of a rehearsal: its twins, its engine, and the trainer
// that plays the script. Private to core/rehearsal.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "base/absent_memory.h"
#include "collectives/communicator.h"
#include "core/engine/engine_tasks.h"
#include "core/engine/runtime.h"
#include "core/rehearsal/rehearsal.h"
#include "core/rehearsal/rehearsal_faults.h"

namespace ziggurat {

/// Returns the room on the drives of all ranks that are played.
std::uint64_t disk_bytes(const RehearsalRequest& request) noexcept;

/// What goes wrong in a rehearsal, and what is seen of it.
struct RehearsalWatch {
  struct Rank {
    std::vector<std::uint64_t> sealing{};  ///< generations, in order, that were to become durable
    std::uint64_t generation = 0;          ///< of the last step that returned
    bool all_durable = false;              ///< make_durable() has returned
    std::uint64_t reads = 0;
    std::uint64_t writes = 0;
    std::uint64_t syncs = 0;
    std::uint64_t messages = 0;
  };
  explicit RehearsalWatch(int count) : ranks(static_cast<std::size_t>(count)) {}
  void must(bool holds, const std::string& otherwise) {
    if (!holds) broken.push_back(otherwise);
  }

  RehearsalFaults faults{};
  AccessLedger ledger{};
  std::vector<Rank> ranks;
  std::vector<std::string> broken{};
  std::uint64_t events = 0;
  std::uint64_t history = 0;
};

/// What the ranks of a rehearsal share.
struct RehearsedWorld {
  /// `watch`, which may be null, outlives the world.
  RehearsedWorld(const RehearsalRequest& its, std::shared_ptr<SimulatedDisk> its_disk,
                 RehearsalWatch* its_watch);
  ~RehearsedWorld();

  const RehearsalRequest& request;
  RehearsalWatch* watch;
  NetworkShape network;
  Reactor reactor{Clock::Kind::kVirtual};
  AbsentMemory absent;
  std::shared_ptr<SimulatedDisk> disk;
  /// By node and directory.
  std::map<std::pair<int, std::string>, DriveBusyUntil> drives;
  std::unique_ptr<Trace> trace;  ///< of rank 0, which takes it; null for none

  AccessLedger* ledger() const noexcept { return watch == nullptr ? nullptr : &watch->ledger; }
};

/// Lets all ranks live. Errors: rehearse()'s.
std::vector<RehearsedRank> play(RehearsedWorld& world);

class RankOnTwins {
 public:
  RankOnTwins(RehearsedWorld& world, std::unique_ptr<Communicator> ranks);
  ~RankOnTwins();

  /// Opens the engine, trains, makes all steps durable and closes it. An error ends all ranks.
  Task<> live();
  /// Returns what it did, once it has lived.
  RehearsedRank take() { return std::move(its_); }

 private:
  /// What has been counted, and when.
  struct Reading {
    std::vector<std::uint64_t> counters;
    double workers_busy_s = 0;
    std::uint64_t sent_in_node = 0;
    std::uint64_t sent_to_nodes = 0;
  };

  void build_runtime(std::unique_ptr<Communicator> ranks);
  std::unique_ptr<IoEngine> make_drive(const std::string& directory, int node);
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
  Reading read() const;
  void count_step(const Reading& before, RehearsedStep& step) const;
  double now() const;

  RehearsedWorld& world_;
  Runtime runtime_;
  int rank_;
  double slowness_ = 1;                // in this step
  std::vector<FaultyEngine*> faulty_;  // its drives, where they are watched
  Trace* trace_ = nullptr;             // null but for rank 0
  int track_ = 0;                      // the trainer's, where the CPU computes
  CostedWorkers* workers_ = nullptr;   // the runtime's
  std::unique_ptr<CostedDevice> device_;
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
