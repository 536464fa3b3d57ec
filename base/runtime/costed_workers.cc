// SPDX-License-Identifier: Apache-2.0
// base/runtime/costed_workers.cc: a queue of jobs, and a timer for each worker that has one.
#include "base/runtime/costed_workers.h"

#include <fmt/format.h>

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

CostedWorkers::Job CostedWorkers::next() {
  const bool in_order = soon_.empty() || (in_order_next_ && !in_order_.empty());
  std::deque<Job>& from = in_order ? in_order_ : soon_;
  const Job its = from.front();
  from.pop_front();
  in_order_next_ = !in_order;
  return its;
}

void CostedWorkers::begin_more() {
  const double each = options_.bytes_per_second / static_cast<double>(options_.threads);
  while (!idle_.empty() && !(soon_.empty() && in_order_.empty())) {
    const std::size_t worker = idle_.back();
    idle_.pop_back();
    const Job job = next();
    const Nanoseconds takes =
        options_.latency + nanoseconds_of(static_cast<double>(job.work.bytes) / each);
    busy_ += takes;
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
