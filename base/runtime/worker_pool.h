// SPDX-License-Identifier: Apache-2.0
// base/runtime/worker_pool.h: the CPU cores the engine may use: one thread per physical core of its
// budget.
//
// Two kinds of work share the threads. A *team region* is the trainer's compute: the same function
// on every worker, with dynamic loops and barriers. A *job* is the engine's: a chunk of Adam, a
// rounding, a hash; short (about a millisecond). Jobs run on idle workers, and between the tiles of
// a region, so neither starves the other. Which worker does what never changes a result: a tile's
// arithmetic depends on its index only.
//
// Where workers are on several NUMA nodes, a job may name the one that its bytes lie on. Its
// workers take it; another node's worker does if it is idle and none of theirs is. So a node with
// nothing to do helps, and between two tiles, when nobody is idle, bytes do not cross.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
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

namespace ziggurat {

class WorkerPool;

/// One worker's view of the region it is in. All workers must make the same calls in the same
/// order.
class Team {
 public:
  std::size_t index() const noexcept { return index_; }
  std::size_t size() const noexcept;

  /// Calls body(i) once for every i in [0, count), spread over the team as workers come free;
  /// returns when all are done.
  template <class Body>
  void for_each(std::size_t count, Body&& body) {
    for (std::size_t i = next(); i < count; i = next()) {
      guarded([&] { body(i); });
      run_job_between_tiles();
    }
    barrier();
  }

  /// Returns when every worker has called it.
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
  std::vector<int> cpus;        ///< logical CPU of each worker; empty: not pinned
  std::vector<int> nodes = {};  ///< NUMA node of each worker; empty: all are near each other
  Trace* trace = nullptr;
  Metrics* metrics = nullptr;  ///< counts jobs near the node they named; may be null
};

class WorkerPool {
 public:
  explicit WorkerPool(WorkerPoolOptions options);
  ~WorkerPool();  ///< finishes queued jobs
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  std::size_t threads() const noexcept { return workers_.size(); }

  /// Runs `region` on every worker and returns when all have ended. From the trainer's thread, one
  /// region at a time.
  /// Errors: rethrows the first exception of a for_each body. Outside for_each a region must not
  /// throw.
  void run_team(const std::function<void(Team&)>& region, const char* trace_name = "compute");

  /// run_team with a single loop.
  void for_each(std::size_t count, const std::function<void(std::size_t)>& body) {
    run_team([&](Team& team) { team.for_each(count, body); });
  }

  /// Queues `job`; it must not throw. `name` must outlive the pool (a literal). Best run on a
  /// worker of `numa_node`; -1, or a node without workers: on any. Thread-safe.
  void submit(const char* name, std::function<void()> job, int numa_node = -1);

  /// Runs `job` on a worker and resumes on the reactor; rethrows what it threw. `job` must outlive
  /// the await: name it.
  Task<> run(Reactor& reactor, const char* name, const std::function<void()>& job,
             int numa_node = -1);

 private:
  friend class Team;
  struct Job {
    const char* name;
    std::function<void()> action;
    bool placed;  // it named the node it is queued at
  };
  /// The workers of one node, and what is queued for them. `queued` changes under the mutex only;
  /// who looks for work reads it and `idle` without.
  struct Group {
    int node = -1;
    std::deque<Job> jobs;
    std::condition_variable wake;
    alignas(64) std::atomic<std::size_t> queued{0};
    std::atomic<std::size_t> idle{0};  // asleep, or at a barrier
    internal::Parking parking;         // of workers that wait at a barrier
    /// Jobs that no idle worker of this group is there for.
    bool has_surplus() const noexcept { return queued.load() > idle.load(); }
  };
  enum class Look : std::uint8_t { kOwnNode, kAnyNode };

  void work(std::size_t index);
  void stop();
  void wake_all() noexcept;
  /// Counted only where there is another group to tell.
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
  std::deque<Group> groups_;      // one, or one for each node
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
