// SPDX-License-Identifier: Apache-2.0
// base/runtime/costed_workers.h: the twin of the workers, in virtual time. A job takes as long as
// its bytes take, and is not run unless it decides something.
//
// Each worker has an equal share of the memory's bandwidth, whether the others work or not, as long
// as there are cores. Jobs are begun in the order of WorkerPool. A trainer's region is known by its
// time alone. Reactor's thread only.
#pragma once

#include <deque>
#include <vector>

#include "base/access_ledger.h"
#include "base/runtime/async.h"
#include "base/runtime/trace.h"
#include "base/runtime/workers.h"

namespace ziggurat {

struct CostedWorkersOptions {
  std::size_t threads = 1;
  /// How many of them, and of a trainer's threads beside them, work at once; 0: as many as workers.
  std::size_t cores = 0;
  double bytes_per_second = 0;  ///< of all workers together; must be above 0
  Nanoseconds latency{0};       ///< of each job: to hand it over and to hear of its end
  /// Notes who reads and writes memory; it outlives the workers. Null if nobody looks.
  AccessLedger* ledger = nullptr;
};

class CostedWorkers final : public Workers {
 public:
  /// The reactor has virtual time and outlives the workers; `trace`, which may be null, does too.
  CostedWorkers(Reactor& reactor, const CostedWorkersOptions& options, Trace* trace = nullptr);

  std::size_t threads() const noexcept override { return options_.threads; }
  /// Lets `time` pass on every worker, in tiles between which jobs are begun in turns, as a region
  /// of WorkerPool does. Returns when the last worker is done.
  Task<> compute(const char* name, Nanoseconds time);
  /// Lets a trainer compute for `time` on so many threads of its own, which the workers know
  /// nothing of: where both are more than the cores, all get an equal part.
  Task<> compute_beside(Nanoseconds time, std::size_t threads);

  /// Returns how long all jobs so far took, summed over workers.
  Nanoseconds busy() const noexcept { return busy_; }

 private:
  struct Job {
    Work work;
    const std::function<void()>* action;
    Signal* done;
    Nanoseconds computes{0};  // of a tile: its time
  };
  Task<> begin(Reactor& reactor, Work work, const std::function<void()>& job, int numa_node,
               Turn turn) override;
  Job next();
  void begin_more();
  Nanoseconds time_of(const Job& job) const;
  double share() const noexcept;
  Task<> compute_tiles(const char* name, Nanoseconds tile, std::size_t tiles);
  void end(const Job& job, std::size_t worker);

  Reactor& reactor_;
  CostedWorkersOptions options_;
  std::deque<Job> soon_;
  std::deque<Job> in_order_;
  bool in_order_next_ = false;     // because the last one that was begun had Turn::kSoon
  std::vector<std::size_t> idle_;  // workers, by number; the last one is begun with
  Trace* trace_;
  std::vector<int> tracks_;                                  // by worker
  std::vector<std::vector<AccessLedger::Access>> accesses_;  // of the job that each worker has
  Nanoseconds busy_{0};
  std::size_t beside_ = 0;  // threads of the trainer's that compute
};

}  // namespace ziggurat
