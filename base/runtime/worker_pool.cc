// SPDX-License-Identifier: Apache-2.0
// base/runtime/worker_pool.cc: threads, regions and jobs.
//
// A worker at a barrier runs jobs, then spins for about 20 us, then sleeps. It spins because phases
// follow each other that quickly, and a futex round trip costs as much. A worker that has nothing
// to do sleeps at once.
#include "base/runtime/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/runtime/floating_point.h"
#include "base/runtime/work_ended.h"

namespace ziggurat {
namespace {

constexpr Nanoseconds kSpinAtBarrier{20'000};
constexpr int kRelaxesPerLook = 32;  // takes one to two microseconds between two looks at the clock

void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpu), &set);
  if (const int error = ::pthread_setaffinity_np(::pthread_self(), sizeof(set), &set); error != 0) {
    note_degraded("workers",
                  fmt::format("a worker thread cannot be pinned to CPU {}: errno {}", cpu, error));
  }
}

}  // namespace

std::size_t Team::size() const noexcept { return pool_.threads(); }

std::size_t Team::next() noexcept { return pool_.next_.fetch_add(1, std::memory_order_relaxed); }

// Runs one job, not all: so tiles and jobs take turns even while the queue keeps filling.
void Team::run_job_between_tiles() {
  if (pool_.group_of_[index_]->queued.load(std::memory_order_relaxed) > 0)
    pool_.run_one_job(index_, WorkerPool::Look::kOwnNode);
}

void Team::barrier() { pool_.wait_at_barrier(index_); }

void Team::keep_error(std::exception_ptr error) noexcept {
  const std::lock_guard lock(pool_.mutex_);
  if (!pool_.region_error_) pool_.region_error_ = std::move(error);
}

WorkerPool::WorkerPool(WorkerPoolOptions options)
    : trace_(options.trace), metrics_(options.metrics) {
  ZIGGURAT_CHECK(options.threads > 0, "a pool of no workers");
  ZIGGURAT_CHECK(options.nodes.empty() || options.nodes.size() == options.threads,
                 "{} workers on {} nodes", options.threads, options.nodes.size());
  for (std::size_t i = 0; i < options.threads; ++i) {
    const int node = options.nodes.empty() ? -1 : options.nodes[i];
    auto group = std::ranges::find(groups_, node, &Group::node);
    if (group == groups_.end()) {
      groups_.emplace_back().node = node;
      group = std::prev(groups_.end());
    }
    group_of_.push_back(&*group);
  }
  tracks_.resize(options.threads, 0);
  workers_.reserve(options.threads);
  // Workers call threads(), so they start only when the vector is complete.
  std::unique_lock lock(mutex_);
  for (std::size_t i = 0; i < options.threads; ++i) {
    if (trace_ != nullptr) tracks_[i] = trace_->track(fmt::format("worker {}", i));
    const int cpu = i < options.cpus.size() ? options.cpus[i] : -1;
    try {
      workers_.emplace_back([this, i, cpu] {
        ::pthread_setname_np(::pthread_self(), fmt::format("zig-worker-{}", i).c_str());
        internal::set_floating_point_environment();
        if (cpu >= 0) pin_this_thread(cpu);
        work(i);
      });
    } catch (const std::system_error& error) {
      lock.unlock();
      stop();
      throw Error(
          ErrorCode::kResourceExhausted,
          fmt::format(
              "cannot start worker thread {} of {}: {}; use fewer threads or raise the limit "
              "(ulimit -u, pids.max)",
              i + 1, options.threads, errno_text(error.code().value())),
          error.code().value());
    }
  }
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::wake_all() noexcept {
  for (Group& group : groups_) group.wake.notify_all();
}

void WorkerPool::work(std::size_t index) {
  Group& own = *group_of_[index];
  std::uint64_t regions_seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    begin_idle(own);
    own.wake.wait(lock,
                  [&] { return stopping_ || has_job(own) || region_number_ != regions_seen; });
    end_idle(own);
    if (region_number_ != regions_seen) {
      regions_seen = region_number_;
      const auto& region = *region_;
      const char* name = region_name_;
      lock.unlock();
      {
        const TraceSpan span(trace_, tracks_[index], name);
        Team team(*this, index);
        region(team);
        team.barrier();  // so that nobody is inside the region when the last worker leaves it
      }
      lock.lock();
      if (--region_running_ == 0) region_ended_.notify_all();
    } else if (has_job(own)) {
      lock.unlock();
      run_one_job(index, Look::kAnyNode);
      lock.lock();
    } else if (stopping_) {
      return;  // nothing is left to do
    }
  }
}

/// Returns whether there is a job for an idle worker of `own`.
bool WorkerPool::has_job(const Group& own) const noexcept {
  return own.queued.load() > 0 || std::ranges::any_of(groups_, &Group::has_surplus);
}

/// Returns the node's group. For a job that names no node, returns the group with the most idle
/// workers to spare.
WorkerPool::Group& WorkerPool::queue_for(int numa_node) noexcept {
  const auto named = std::ranges::find(groups_, numa_node, &Group::node);
  if (named != groups_.end()) return *named;
  const auto spare = [](const Group& group) {
    return static_cast<std::ptrdiff_t>(group.idle.load()) -
           static_cast<std::ptrdiff_t>(group.queued.load());
  };
  return *std::ranges::max_element(groups_, {}, spare);
}

/// Returns the group whose queue to take a job from: the worker's own node first; then, if the
/// worker is idle, a group that has more jobs than idle workers.
WorkerPool::Group* WorkerPool::queue_with_job(Group& own, Look look) noexcept {
  if (!own.jobs.empty()) return &own;
  if (look == Look::kOwnNode) return nullptr;
  const auto other = std::ranges::find_if(groups_, &Group::has_surplus);
  return other == groups_.end() ? nullptr : &*other;
}

WorkerPool::Job WorkerPool::Group::next() {
  const bool in_order = soon == 0 || (in_order_next && std::ssize(jobs) > soon);
  const auto at = jobs.begin() + (in_order ? soon : 0);
  Job its = std::move(*at);
  jobs.erase(at);
  if (!in_order) --soon;
  in_order_next = !in_order;
  return its;
}

bool WorkerPool::run_one_job(std::size_t index, Look look) {
  Job job;
  Group& own = *group_of_[index];
  {
    const std::lock_guard lock(mutex_);
    Group* from = queue_with_job(own, look);
    if (from == nullptr) return false;
    job = from->next();
    from->queued.store(from->jobs.size());
    if (metrics_ != nullptr && job.placed)
      metrics_->add(from == &own ? Counter::kJobsOnNode : Counter::kJobsElsewhere, 1);
  }
  const TraceSpan span(trace_, tracks_[index], job.name);
  job.action();
  return true;
}

void WorkerPool::wait_at_barrier(std::size_t index) {
  const std::uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == workers_.size()) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);  // sequentially consistent, for parking_
    for (Group& group : groups_) group.parking.wake_all();
    return;
  }
  Group& own = *group_of_[index];
  const auto may_go_on = [&] { return phase_.load() != phase || has_job(own); };
  Nanoseconds spin_until = monotonic_now() + kSpinAtBarrier;
  begin_idle(own);
  while (phase_.load(std::memory_order_acquire) == phase) {
    if (has_job(own)) {
      end_idle(own);
      run_one_job(index, Look::kAnyNode);
      begin_idle(own);
      spin_until = monotonic_now() + kSpinAtBarrier;
    } else if (monotonic_now() < spin_until) {
      for (int i = 0; i < kRelaxesPerLook && !may_go_on(); ++i) relax();
    } else {
      own.parking.park_unless(may_go_on);
    }
  }
  end_idle(own);
}

void WorkerPool::run_team(const std::function<void(Team&)>& region, const char* trace_name) {
  std::unique_lock lock(mutex_);
  ZIGGURAT_CHECK(region_ == nullptr, "one region at a time");
  region_ = &region;
  region_name_ = trace_name;
  region_error_ = {};
  region_running_ = workers_.size();
  ++region_number_;
  wake_all();
  region_ended_.wait(lock, [&] { return region_running_ == 0; });
  region_ = nullptr;
  if (region_error_) std::rethrow_exception(std::exchange(region_error_, {}));
}

void WorkerPool::submit(const char* name, std::function<void()> job, int numa_node, Turn turn) {
  Group* woken = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Group& group = queue_for(numa_node);
    const bool placed = groups_.size() > 1 && group.node == numa_node;
    const auto place = turn == Turn::kSoon ? group.jobs.begin() + group.soon++ : group.jobs.end();
    group.jobs.insert(place, {name, std::move(job), placed});
    group.queued.store(group.jobs.size());  // sequentially consistent, as Parking needs
    woken = &group;
    if (group.has_surplus()) {
      const auto other = std::ranges::find_if(
          groups_, [](const Group& its) { return its.idle.load() > its.queued.load(); });
      if (other != groups_.end()) woken = &*other;
    }
  }
  // A worker sleeps in one of two places, and this thread does not know in which. To wake nobody is
  // cheap.
  woken->wake.notify_one();
  woken->parking.wake_one();
}

Task<> WorkerPool::begin(Reactor& reactor, Work work, const std::function<void()>& job,
                         int numa_node, Turn turn) {
  Signal done(reactor);
  reactor.external_begin();
  const auto report = [&reactor, &done, &job] {
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    reactor.post([&reactor, &done, error] {
      work_ended(reactor);
      if (error) {
        done.fail(error);
      } else {
        done.set();
      }
    });
  };
  submit(work.name, report, numa_node, turn);
  co_await done.wait();
}

}  // namespace ziggurat
