// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rank_twins.h: what ranks of a rehearsal share, and the twins of one rank, on which
// its engine is opened whoever its trainer is. Private to core/rehearsal.
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
  /// `lent_bytes` are addresses for what trainers lend.
  RehearsedWorld(const RehearsalRequest& its, std::shared_ptr<SimulatedDisk> its_disk,
                 RehearsalWatch* its_watch, std::uint64_t lent_bytes = 0);
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

/// Lets `seconds` pass beside the workers.
Task<> pass_time(Reactor& reactor, double seconds);

class RankTwins {
 protected:
  RankTwins(RehearsedWorld& world, std::unique_ptr<Communicator> ranks);
  ~RankTwins();

  /// What has been counted, and when.
  struct Reading {
    std::vector<std::uint64_t> counters;
    double workers_busy_s = 0;
    std::uint64_t sent_in_node = 0;
    std::uint64_t sent_to_nodes = 0;
  };
  Reading read() const;
  /// Notes in `step` what was counted since `before`, and the peaks so far.
  void count_step(const Reading& before, const Account& host, RehearsedStep& step) const;
  double now() const;

  RehearsedWorld& world_;
  Runtime runtime_;
  int rank_;
  std::vector<FaultyEngine*> faulty_;  // its drives, where they are watched
  Trace* trace_ = nullptr;             // null but for rank 0
  int track_ = 0;                      // the trainer's, where the CPU computes
  CostedWorkers* workers_ = nullptr;   // the runtime's
  std::unique_ptr<CostedDevice> device_;

 private:
  void build_runtime(std::unique_ptr<Communicator> ranks);
  std::unique_ptr<IoEngine> make_drive(const std::string& directory, int node);
};

}  // namespace ziggurat
