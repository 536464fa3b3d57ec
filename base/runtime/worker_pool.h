// SPDX-License-Identifier: Apache-2.0
// base/runtime/worker_pool.h: the CPU cores the engine may use: one thread per physical core of its
// budget.
//
// Two kinds of work share the threads. A *team region* is the trainer's compute: the same function
// on every worker, with dynamic loops and barriers. A *job* is the engine's: a chunk of Adam, a
// rounding, a hash; short (about a millisecond). Jobs run on idle workers, and between the tiles of
// a region, so neither starves the other. Which worker does what never changes a result: a tile's
// arithmetic depends on its index only.
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
  std::vector<int> cpus;  ///< logical CPU of each worker; empty: not pinned
  Trace* trace = nullptr;
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

  /// Queues `job`; it must not throw. `name` must outlive the pool (a literal). Thread-safe.
  void submit(const char* name, std::function<void()> job);

  /// Runs `job` on a worker and resumes on the reactor; rethrows what it threw. `job` must outlive
  /// the await: name it.
  Task<> run(Reactor& reactor, const char* name, const std::function<void()>& job);

 private:
  friend class Team;
  struct Job {
    const char* name;
    std::function<void()> action;
  };

  void work(std::size_t index);
  void stop();
  bool run_one_job(std::size_t index);
  void wait_at_barrier(std::size_t index);

  Trace* trace_;
  std::vector<int> tracks_;
  std::vector<std::thread> workers_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable region_ended_;
  std::deque<Job> jobs_;
  const std::function<void(Team&)>* region_ = nullptr;
  const char* region_name_ = "";
  std::uint64_t region_number_ = 0;
  std::size_t region_running_ = 0;
  std::exception_ptr region_error_;
  bool stopping_ = false;

  std::atomic<std::size_t> job_count_{0};
  alignas(64) std::atomic<std::size_t> next_{0};
  alignas(64) std::atomic<std::size_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
  internal::Parking parking_;  // of workers that wait at a barrier
};

}  // namespace ziggurat
