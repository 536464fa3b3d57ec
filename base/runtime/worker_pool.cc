// SPDX-License-Identifier: Apache-2.0
// base/runtime/worker_pool.cc: threads, regions and jobs.
//
// A worker between two phases of a region spins for about 20 us before it sleeps: phases are that
// short, and a futex round trip costs as much. A worker with nothing at all to do sleeps at once.
#include "base/runtime/worker_pool.h"

#include <pthread.h>
#include <sched.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <boost/asio/post.hpp>

#include "base/check.h"
#include "base/log.h"

namespace ziggurat {
namespace {

constexpr int kSpinsBeforeSleep = 2000;

void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Embedders may have flush-to-zero on, and threads inherit it: it would change bits.
void set_floating_point_environment() noexcept {
#if defined(__x86_64__)
  _mm_setcsr(0x1f80);  // round to nearest, denormals kept, exceptions masked
#endif
}

void pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpu), &set);
  if (const int error = ::pthread_setaffinity_np(::pthread_self(), sizeof(set), &set); error != 0) {
    note_degraded("workers", fmt::format("cannot pin a worker to CPU {}: errno {}", cpu, error));
  }
}

}  // namespace

std::size_t Team::size() const noexcept { return pool_.threads(); }

std::size_t Team::next() noexcept { return pool_.next_.fetch_add(1, std::memory_order_relaxed); }

void Team::run_jobs() {
  while (pool_.job_count_.load(std::memory_order_relaxed) > 0 && pool_.run_one_job(index_)) {
  }
}

void Team::barrier() { pool_.wait_at_barrier(index_); }

void Team::keep_error(std::exception_ptr error) noexcept {
  const std::lock_guard lock(pool_.mutex_);
  if (!pool_.region_error_) pool_.region_error_ = std::move(error);
}

WorkerPool::WorkerPool(WorkerPoolOptions options) : trace_(options.trace) {
  ZIGGURAT_CHECK(options.threads > 0, "a pool of no workers");
  tracks_.resize(options.threads, 0);
  workers_.reserve(options.threads);
  std::unique_lock lock(mutex_);  // workers read threads(): let them start when the vector is whole
  for (std::size_t i = 0; i < options.threads; ++i) {
    if (trace_ != nullptr) tracks_[i] = trace_->track(fmt::format("worker {}", i));
    const int cpu = i < options.cpus.size() ? options.cpus[i] : -1;
    workers_.emplace_back([this, i, cpu] {
      ::pthread_setname_np(::pthread_self(), fmt::format("zig-worker-{}", i).c_str());
      set_floating_point_environment();
      if (cpu >= 0) pin_this_thread(cpu);
      work(i);
    });
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::work(std::size_t index) {
  std::uint64_t regions_seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty() || region_number_ != regions_seen; });
    if (region_number_ != regions_seen) {
      regions_seen = region_number_;
      const auto& region = *region_;
      const char* name = region_name_;
      lock.unlock();
      {
        const TraceSpan span(trace_, tracks_[index], name);
        Team team(*this, index);
        region(team);
        team.barrier();  // so that the last worker to leave leaves nobody inside
      }
      lock.lock();
      if (--region_running_ == 0) region_ended_.notify_all();
    } else if (!jobs_.empty()) {
      lock.unlock();
      run_one_job(index);
      lock.lock();
    } else {
      return;  // stopping, and the queue is empty
    }
  }
}

bool WorkerPool::run_one_job(std::size_t index) {
  Job job;
  {
    const std::lock_guard lock(mutex_);
    if (jobs_.empty()) return false;
    job = std::move(jobs_.front());
    jobs_.pop_front();
    job_count_.store(jobs_.size(), std::memory_order_relaxed);
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
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    if (job_count_.load(std::memory_order_relaxed) > 0 && run_one_job(index)) {
      spins = 0;
    } else if (spins < kSpinsBeforeSleep) {
      relax();
    } else {
      phase_.wait(phase, std::memory_order_acquire);
    }
  }
}

void WorkerPool::run_team(const std::function<void(Team&)>& region, const char* trace_name) {
  std::unique_lock lock(mutex_);
  ZIGGURAT_CHECK(region_ == nullptr, "one region at a time");
  region_ = &region;
  region_name_ = trace_name;
  region_error_ = {};
  region_running_ = workers_.size();
  ++region_number_;
  wake_.notify_all();
  region_ended_.wait(lock, [&] { return region_running_ == 0; });
  region_ = nullptr;
  if (region_error_) std::rethrow_exception(std::exchange(region_error_, {}));
}

void WorkerPool::submit(const char* name, std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back({name, std::move(job)});
    job_count_.store(jobs_.size(), std::memory_order_relaxed);
  }
  wake_.notify_one();
}

Task<> WorkerPool::run(Reactor& reactor, const char* name, const std::function<void()>& job) {
  Signal done(reactor);
  reactor.external_begin();
  submit(name, [&reactor, &done, &job] {
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    reactor.post([&reactor, &done, error] {
      reactor.external_end();
      if (error) {
        done.fail(error);
      } else {
        done.set();
      }
    });
  });
  co_await done.wait();
}

}  // namespace ziggurat
