// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/machine.cc: virtual time; see machine.h.
#include "tests/cuda_double/machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "base/check.h"
#include "tests/cuda_double/quiet.h"

namespace ziggurat::cuda_double {
namespace {

thread_local bool host_function_runs = false;

/// Findings that nobody took must not end in a green test.
void end_with_findings() {
  Machine& its = machine();
  if (its.findings.empty()) return;
  for (const std::string& finding : its.findings) {
    std::fprintf(stderr, "cuda_double: %s\n", finding.c_str());
  }
  std::fflush(nullptr);
  _exit(1);
}

}  // namespace

Machine& machine() {
  static Machine* const one = new Machine;  // static objects of kernels use it to the very end
  return *one;
}

bool in_host_function() noexcept { return host_function_runs; }

void Machine::reset(std::uint64_t new_seed, const Options& new_options) {
  const Lock lock(mutex);
  ZIGGURAT_CHECK(host_functions_.empty(), "cuda_double: reset() while a host function runs");
  static const int registered = std::atexit(end_with_findings);
  static_cast<void>(registered);
  seed = new_seed;
  ++resets;
  options = new_options;
  installed = true;
  now_ns = calls = completions = trace = 0;
  fail_call_at = fail_completion_at = 0;
  struck.clear();
  host = {};
  host_knows = {};
  host_tick = 0;
  history = {};
  newest_sources.clear();
  host_functions_queued_ = 0;
  for (const std::string& finding : findings) {
    std::fprintf(stderr, "cuda_double: not taken before reset(): %s\n", finding.c_str());
  }
  ZIGGURAT_CHECK(findings.empty(), "cuda_double: {} findings were not taken", findings.size());
  streams.clear();
  thread_streams.clear();
  events.clear();
  devices.clear();
  pools.clear();
  for (int i = 0; i < options.devices; ++i) {
    devices.push_back(std::make_unique<DeviceState>(i, options, mix(seed, 1000u + unsigned(i))));
    streams.push_back(std::make_unique<CUstream_st>());
    streams.back()->device = i;
    streams.back()->implicit = true;
    streams.back()->actor = static_cast<Actor>(streams.size());
    devices.back()->null_stream = streams.back().get();
  }
}

void Machine::submit(cudaStream_t stream, Operation operation) {
  auto ours = std::make_shared<Operation>(std::move(operation));
  // The null stream and blocking streams wait for each other (cuda_runtime_api.h, "Stream
  // synchronization behavior", legacy default stream).
  const cudaStream_t null_stream = devices[static_cast<std::size_t>(stream->device)]->null_stream;
  for (const auto& other : streams) {
    const bool joins = other->device == stream->device && other.get() != stream &&
                       (other->flags & cudaStreamNonBlocking) == 0 &&
                       (stream->flags & cudaStreamNonBlocking) == 0 &&
                       (stream == null_stream || other.get() == null_stream);
    if (joins && other->last) ours->after.push_back(other->last);
  }
  ours->stream = stream;
  ours->number = ++stream->submitted;
  ours->submitted_ns = now_ns;
  const std::uint64_t random = mix(mix(seed, stream->actor), ours->number);
  ours->duration_ns = ours->duration_ns * (50 + random % 100) / 100;
  stream->knows.merge(host_knows);
  for (const OperationRef& before : ours->after) stream->knows.merge(before->knows);
  stream->knows.set(stream->actor, ours->number);
  ours->knows = stream->knows;
  if (ours->on_host) ++host_functions_queued_;
  stream->queue.push_back(ours);
  stream->last = ours;
  if (ours->on_host) {
    if (host_thread_of_process_ != getpid()) {
      host_thread_of_process_ = getpid();
      std::thread([this] { serve_host_functions(); }).detach();
    }
    changed_.notify_all();
  }
}

OperationRef Machine::last_of(cudaStream_t stream) { return stream->last; }

bool Machine::idle(cudaStream_t stream) {
  return std::all_of(stream->queue.begin(), stream->queue.end(), [](const OperationRef& operation) {
    return operation->state == Operation::State::kDone;
  });
}

Machine::Next Machine::next() const {
  Next best;
  std::uint64_t best_tie = 0;
  for (const auto& stream : streams) {
    if (stream->queue.empty()) continue;
    const Operation& head = *stream->queue.front();
    if (head.outside_time) continue;
    std::uint64_t end = head.end_ns;
    if (head.state == Operation::State::kQueued) {
      std::uint64_t start = std::max(head.submitted_ns, stream->end_ns);
      const bool ready = std::all_of(head.after.begin(), head.after.end(), [&](const auto& before) {
        start = std::max(start, before->end_ns);
        return before->state == Operation::State::kDone;
      });
      if (!ready) continue;
      end = start + head.duration_ns;
    }
    const std::uint64_t tie = mix(mix(seed, stream->actor), head.number + (1ull << 40));
    if (best.stream != nullptr && std::pair(end, tie) >= std::pair(best.end_ns, best_tie)) continue;
    best = {stream.get(), end};
    best_tie = tie;
  }
  return best;
}

std::optional<std::uint64_t> Machine::next_end() const {
  const Next best = next();
  if (best.stream == nullptr) return std::nullopt;
  return best.end_ns;
}

bool Machine::step(Lock& lock, std::uint64_t until_ns) {
  const Next best = next();
  if (best.stream == nullptr || best.end_ns > until_ns) return false;
  const OperationRef head = best.stream->queue.front();
  if (head->state == Operation::State::kOnHost) {
    wait_on_host(lock, head);
    return true;
  }
  now_ns = std::max(now_ns, best.end_ns);
  complete(lock, head, best.end_ns);
  return true;
}

void Machine::complete(Lock&, const OperationRef& operation, std::uint64_t end_ns) {
  DeviceState& device = *devices[static_cast<std::size_t>(operation->stream->device)];
  operation->end_ns = end_ns;
  ++completions;
  if (completions == fail_completion_at && device.sticky == cudaSuccess) {
    operation->error = completion_error;
    struck = operation->what;
    fail_device(operation->stream->device, completion_error);
  } else if (device.sticky != cudaSuccess) {
    operation->error = device.sticky;
  } else if (operation->body) {
    operation->error = operation->body(operation->accesses);
    if (operation->error != cudaSuccess) {
      fail_device(operation->stream->device, operation->error);
    }
  }
  const Act act{operation->stream->actor, operation->number, operation->knows, operation->what};
  for (const Access& access : operation->accesses) {
    if (const auto race = history.add(access, act)) find(*race);
  }
  trace = mix(mix(trace, operation->stream->actor), operation->number);
  trace = mix(mix(trace, std::hash<std::string>{}(operation->what)), end_ns);
  trace = mix(trace, static_cast<std::uint64_t>(operation->error));
  if (operation->is_section && operation->error == cudaSuccess) {
    operation->state = Operation::State::kOnHost;
    operation->outside_time = true;
    changed_.notify_all();
    return;
  }
  if (operation->on_host && (operation->error == cudaSuccess || operation->on_host_after_error)) {
    // "The start of execution of the function has the same effect as synchronizing an event
    // recorded in the same stream immediately prior" (cuda_runtime_api.h:4101-4102).
    host_knows.merge(operation->knows);
    operation->state = Operation::State::kOnHost;
    operation->end_ns = end_ns + 1000 + mix(seed, trace) % 5000;
    host_functions_.push_back(operation);
    changed_.notify_all();
    return;
  }
  finish(*operation);
}

void Machine::finish(Operation& operation) {
  operation.state = Operation::State::kDone;
  if (operation.on_host) --host_functions_queued_;
  operation.body = nullptr;
  operation.on_host = nullptr;
  operation.after.clear();
  auto& queue = operation.stream->queue;
  ZIGGURAT_CHECK(queue.front().get() == &operation,
                 "cuda_double: {} is not the first of its stream", operation.what);
  operation.stream->end_ns = operation.end_ns;
  const OperationRef keep = queue.front();
  queue.pop_front();
  changed_.notify_all();
}

void Machine::wait_on_host(Lock& lock, const OperationRef& operation) {
  const auto over = [&] { return operation->state == Operation::State::kDone; };
  if (changed_.wait_for(lock, options.host_function_patience, over)) return;
  operation->outside_time = true;
}

void Machine::serve_host_functions() {
  host_function_runs = true;
  Lock lock(mutex);
  for (;;) {
    while (host_functions_.empty()) {
      const bool ours = host_functions_queued_ > 0 && options.pace == Pace::kWhenWaitedFor;
      if (!ours || !step(lock)) changed_.wait(lock);
    }
    const OperationRef operation = host_functions_.front();
    lock.unlock();
    operation->on_host(operation->error);
    lock.lock();
    host_functions_.pop_front();
    if (operation->outside_time) operation->end_ns = std::max(now_ns, operation->end_ns);
    now_ns = std::max(now_ns, operation->end_ns);
    finish(*operation);
  }
}

cudaError_t Machine::wait_for(Lock& lock, const OperationRef& operation) {
  if (!operation) return cudaSuccess;
  const int device = operation->stream->device;
  const auto limit = std::chrono::steady_clock::now() + options.hang_after;
  while (operation->state != Operation::State::kDone) {
    // What waits for a lost device returns at once, done or not: the copy may still be under way.
    const cudaError_t lost = devices[static_cast<std::size_t>(device)]->sticky;
    if (lost != cudaSuccess) return lost;
    go_on(lock, limit, *operation);
  }
  if (options.pace == Pace::kWhenQuiet) changed_.notify_all();  // another may keep time now
  host_knows.merge(operation->knows);
  synchronized(device);
  return devices[static_cast<std::size_t>(device)]->sticky;
}

cudaError_t Machine::wait_for_begin(Lock& lock, const OperationRef& section) {
  const auto limit = std::chrono::steady_clock::now() + options.hang_after;
  const auto& device = *devices[static_cast<std::size_t>(section->stream->device)];
  while (section->state == Operation::State::kQueued && device.sticky == cudaSuccess)
    go_on(lock, limit, *section);
  return device.sticky;
}

void Machine::end(Operation& section) {
  section.outside_time = false;
  section.end_ns = std::max(now_ns, section.end_ns);
  finish(section);
}

void Machine::go_on(Lock& lock, std::chrono::steady_clock::time_point limit,
                    const Operation& operation) {
  if (options.pace == Pace::kWhenWaitedFor && step(lock)) return;
  if (options.pace == Pace::kWhenQuiet && !keeps_time_) {
    go_on_when_quiet(lock);
    if (std::chrono::steady_clock::now() > limit) hang(operation.what.c_str());
    return;
  }
  if (changed_.wait_until(lock, limit) == std::cv_status::timeout) hang(operation.what.c_str());
}

void Machine::go_on_when_quiet(Lock& lock) {
  constexpr std::chrono::microseconds kPause{20};
  keeps_time_ = true;
  const std::uint64_t calls_before = calls;
  lock.unlock();
  const int computing = options.computing_thread;
  const bool quiet =
      computing == 0 ? all_others_sleep() : computing == gettid() || sleeps(computing);
  if (!quiet) std::this_thread::sleep_for(kPause);
  lock.lock();
  keeps_time_ = false;
  // Who sleeps for the mutex has counted no call yet, but was seen before it let go of it.
  if (quiet && (computing != 0 || calls == calls_before)) static_cast<void>(step(lock));
}

cudaError_t Machine::query(Lock& lock, const OperationRef& operation) {
  if (!operation) return cudaSuccess;
  const int device = operation->stream->device;
  const cudaError_t lost = devices[static_cast<std::size_t>(device)]->sticky;
  if (lost != cudaSuccess) return lost;
  if (operation->state == Operation::State::kDone) {
    host_knows.merge(operation->knows);
    return cudaSuccess;
  }
  if (options.pace == Pace::kWhenWaitedFor) static_cast<void>(step(lock));
  return cudaErrorNotReady;
}

void Machine::hang(const char* what) const {
  std::fprintf(stderr, "cuda_double: a thread waits for %s, and nothing can go on:\n", what);
  for (const auto& stream : streams) {
    if (stream->queue.empty()) continue;
    const Operation& head = *stream->queue.front();
    std::fprintf(stderr, "  stream %u: %s %s\n", stream->actor, head.what.c_str(),
                 head.state == Operation::State::kOnHost ? "runs on the host" : "is queued");
  }
  std::abort();
}

}  // namespace ziggurat::cuda_double
