// SPDX-License-Identifier: Apache-2.0
// base/runtime/worker_pool.h: threads for the CPU cores that the engine may use, one per physical
// core of its budget.
//
// Two kinds of work share the threads. A *team region* is the trainer's compute: the same function
// on every worker, with dynamic loops and barriers. A *job* is the engine's: a chunk of Adam, a
// rounding, a hash; short (about a millisecond). Jobs run on idle workers and between the tiles of
// a region, so that neither starves the other. Which worker does a piece of work never changes a
// result: a tile's arithmetic depends on its index only.
//
// If workers are on several NUMA nodes, a job may name the node of its bytes. The workers of that
// node take it. An idle worker of another node takes it only if none of that node's workers is
// idle. So an idle node helps, and while nobody is idle, no bytes cross between nodes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/runtime/async.h"
#include "base/runtime/metrics.h"
#include "base/runtime/parking.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "base/runtime/workers.h"

namespace ziggurat {

class WorkerPool;

/// One worker's view of the region that it runs. All workers must make the same calls in the same
/// order.
class Team {
 public:
  std::size_t index() const noexcept { return index_; }
  std::size_t size() const noexcept;

  /// Calls body(i) once for every i in [0, count), on whichever workers are free. Returns when all
  /// are done.
  template <class Body>
  void for_each(std::size_t count, Body&& body) {
    for (std::size_t i = next(); i < count; i = next()) {
      guarded([&] { body(i); });
      run_job_between_tiles();
    }
    barrier();
  }

  /// Waits until every worker of the team has called it.
  void barrier();

 private:
  friend class WorkerPool;
  Team(WorkerPool& pool, std::size_t index) : pool_(pool), index_(index) {}
  std::size_t next() noexcept;
  void run_job_between_tiles();
  void keep_error(std::exception_ptr error) noexcept;
  template <class F>
  void guarded(F&& action) noexcept {
    try {
      action();
    } catch (...) {
      keep_error(std::current_exception());
    }
  }

  WorkerPool& pool_;
  std::size_t index_;
};

struct WorkerPoolOptions {
  std::size_t threads = 1;
  std::vector<int> cpus;        ///< logical CPU of each worker; if empty, workers are not pinned
  std::vector<int> nodes = {};  ///< NUMA node of each worker; if empty, all count as near each
                                ///< other
  Trace* trace = nullptr;
  Metrics* metrics = nullptr;  ///< counts jobs by whether they ran on the node they named; may be
                               ///< null
};

class WorkerPool final : public Workers {
 public:
  explicit WorkerPool(WorkerPoolOptions options);
  ~WorkerPool() override;  ///< finishes queued jobs
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  std::size_t threads() const noexcept override { return workers_.size(); }

  /// Runs `region` on every worker and returns when all have ended. Called from the trainer's
  /// thread, one region at a time. Errors: rethrows the first exception of a for_each body. Outside
  /// for_each a region must not throw.
  void run_team(const std::function<void(Team&)>& region, const char* trace_name = "compute");

  /// Runs a region that has a single loop.
  void for_each(std::size_t count, const std::function<void(std::size_t)>& body) {
    run_team([&](Team& team) { team.for_each(count, body); });
  }

  /// Queues `job`, which must not throw. `name` must outlive the pool (a literal). Workers of
  /// `numa_node` take it first; with -1, or a node without workers, any worker does. Thread-safe.
  void submit(const char* name, std::function<void()> job, int numa_node = -1,
              Turn turn = Turn::kInOrder);

 private:
  friend class Team;
  Task<> begin(Reactor& reactor, Work work, const std::function<void()>& job, int numa_node,
               Turn turn) override;
  struct Job {
    const char* name;
    std::function<void()> action;
    bool placed;  // it named the node at which it is queued
  };
  /// The workers of one node, and the jobs queued for them. `queued` changes under the mutex only;
  /// workers that look for a job read `queued` and `idle` without the mutex.
  struct Group {
    int node = -1;
    std::deque<Job> jobs;
    std::ptrdiff_t soon = 0;     // how many of them, the first ones, have Turn::kSoon
    bool in_order_next = false;  // because the last one that was begun had Turn::kSoon
    /// Takes the job that is to be begun next; there is one.
    Job next();
    std::condition_variable wake;
    alignas(64) std::atomic<std::size_t> queued{0};
    std::atomic<std::size_t> idle{0};  // workers asleep, or at a barrier
    internal::Parking parking;         // for workers that wait at a barrier
    /// Returns whether this group has more jobs than idle workers.
    bool has_surplus() const noexcept { return queued.load() > idle.load(); }
  };
  enum class Look : std::uint8_t { kOwnNode, kAnyNode };

  void work(std::size_t index);
  void stop();
  void wake_all() noexcept;
  /// Counts idle workers only if there are several groups, because only other groups read the
  /// count.
  void begin_idle(Group& own) noexcept {
    if (groups_.size() > 1) own.idle.fetch_add(1);
  }
  void end_idle(Group& own) noexcept {
    if (groups_.size() > 1) own.idle.fetch_sub(1);
  }
  bool has_job(const Group& own) const noexcept;
  Group& queue_for(int numa_node) noexcept;
  Group* queue_with_job(Group& own, Look look) noexcept;
  bool run_one_job(std::size_t index, Look look);
  void wait_at_barrier(std::size_t index);

  Trace* trace_;
  Metrics* metrics_;
  std::vector<int> tracks_;
  std::vector<std::thread> workers_;
  std::deque<Group> groups_;      // one, or one per node
  std::vector<Group*> group_of_;  // by worker

  std::mutex mutex_;
  std::condition_variable region_ended_;
  const std::function<void(Team&)>* region_ = nullptr;
  const char* region_name_ = "";
  std::uint64_t region_number_ = 0;
  std::size_t region_running_ = 0;
  std::exception_ptr region_error_;
  bool stopping_ = false;

  alignas(64) std::atomic<std::size_t> next_{0};
  alignas(64) std::atomic<std::size_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
};

}  // namespace ziggurat
