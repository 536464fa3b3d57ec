// SPDX-License-Identifier: Apache-2.0
// base/runtime/costed_workers.cc: a queue of jobs, and a timer for each worker that has one.
#include "base/runtime/costed_workers.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/runtime/seconds.h"

namespace ziggurat {

CostedWorkers::CostedWorkers(Reactor& reactor, const CostedWorkersOptions& options, Trace* trace)
    : reactor_(reactor), options_(options), trace_(trace) {
  ZIGGURAT_CHECK(options.threads > 0 && options.bytes_per_second > 0, "{} workers at {} bytes/s",
                 options.threads, options.bytes_per_second);
  ZIGGURAT_CHECK(reactor.clock().kind() == Clock::Kind::kVirtual, "a twin in real time");
  for (std::size_t worker = options.threads; worker-- > 0;) idle_.push_back(worker);
  accesses_.resize(options.threads);
  for (std::size_t worker = 0; trace != nullptr && worker < options.threads; ++worker)
    tracks_.push_back(trace->track(fmt::format("worker {}", worker)));
}

Task<> CostedWorkers::begin(Reactor&, Work work, const std::function<void()>& job, int, Turn turn) {
  Signal done(reactor_);
  (turn == Turn::kSoon ? soon_ : in_order_).push_back({work, &job, &done});
  begin_more();
  co_await done.wait();
}

Task<> CostedWorkers::compute(const char* name, Nanoseconds time) {
  constexpr Nanoseconds kTile{1'000'000};  // of the trainer's, at most (integrations/gpt/matmul.h)
  const auto tiles = static_cast<std::size_t>((time + kTile - Nanoseconds(1)) / kTile);
  if (tiles == 0) co_return;
  const Nanoseconds tile = time / static_cast<std::int64_t>(tiles);
  WorkGroup lanes(reactor_);
  for (std::size_t worker = 0; worker < options_.threads; ++worker)
    lanes.spawn(compute_tiles(name, tile, tiles));
  co_await lanes.wait_idle();
}

/// Computes one worker's tiles. Each waits in its turn, as jobs do that others wait for.
Task<> CostedWorkers::compute_tiles(const char* name, Nanoseconds tile, std::size_t tiles) {
  for (std::size_t i = 0; i < tiles; ++i) {
    Signal done(reactor_);
    soon_.push_back({{.name = name, .bytes = 0}, nullptr, &done, tile});
    begin_more();
    co_await done.wait();
  }
}

Task<> CostedWorkers::compute_beside(Nanoseconds time, std::size_t threads) {
  // After each slice it is looked who else computes. However long the time, they are few.
  constexpr Nanoseconds kSlice{1'000'000};
  constexpr int kSlices = 1000;
  const Nanoseconds most = std::max(kSlice, time / kSlices);
  beside_ += threads;
  while (time > Nanoseconds(0)) {
    const Nanoseconds slice = std::min(time, most);
    time -= slice;
    const auto takes = std::chrono::duration_cast<Nanoseconds>(slice / share());
    Signal over(reactor_);
    reactor_.clock().after(takes, [&over] { over.set(); });
    co_await over.wait();
  }
  beside_ -= threads;
}

/// Returns the part of a core that each thread gets which has something to do.
double CostedWorkers::share() const noexcept {
  const std::size_t cores = options_.cores > 0 ? options_.cores : options_.threads;
  const std::size_t busy = options_.threads - idle_.size() + beside_;
  return busy <= cores ? 1 : static_cast<double>(cores) / static_cast<double>(busy);
}

Nanoseconds CostedWorkers::time_of(const Job& job) const {
  if (job.computes > Nanoseconds(0)) return job.computes;
  const double each = options_.bytes_per_second / static_cast<double>(options_.threads);
  return options_.latency + nanoseconds_of(static_cast<double>(job.work.bytes) / each);
}

CostedWorkers::Job CostedWorkers::next() {
  const bool in_order = soon_.empty() || (in_order_next_ && !in_order_.empty());
  std::deque<Job>& from = in_order ? in_order_ : soon_;
  const Job its = from.front();
  from.pop_front();
  in_order_next_ = !in_order;
  return its;
}

void CostedWorkers::begin_more() {
  while (!idle_.empty() && !(soon_.empty() && in_order_.empty())) {
    const std::size_t worker = idle_.back();
    idle_.pop_back();
    const Job job = next();
    const auto takes = std::chrono::duration_cast<Nanoseconds>(time_of(job) / share());
    if (job.computes == Nanoseconds(0)) busy_ += takes;
    if (options_.ledger != nullptr) {
      const Work& its = job.work;
      accesses_[worker].push_back(AccessLedger::read(options_.ledger, its.read, its.name));
      for (const std::span<const std::byte> bytes : {its.written, its.also_written})
        accesses_[worker].push_back(AccessLedger::write(options_.ledger, bytes, its.name));
    }
    if (trace_ != nullptr) {
      const Nanoseconds now = reactor_.clock().now();
      trace_->span(tracks_[worker], job.work.name, now, now + takes);
    }
    reactor_.clock().after(takes, [this, job, worker] { end(job, worker); });
  }
}

void CostedWorkers::end(const Job& job, std::size_t worker) {
  accesses_[worker].clear();
  std::exception_ptr error;
  try {
    if (job.work.decides) (*job.action)();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    job.done->fail(error);
  } else {
    job.done->set();
  }
  idle_.push_back(worker);
  begin_more();
}

}  // namespace ziggurat
