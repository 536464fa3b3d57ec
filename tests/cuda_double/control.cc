// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/control.cc: cuda_double.h, over the machine.
#include "tests/cuda_double/cuda_double.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "tests/cuda_double/machine.h"

namespace ziggurat::cuda_double {
namespace {

void find_leaks(Machine& its) {
  for (const auto& device : its.devices) {
    for (const auto& [begin, allocation] : device->memory.allocations()) {
      if (allocation.of_module) continue;
      its.find(fmt::format("leak: {} bytes of device {}'s memory at {:#x}",
                           allocation.range.size_bytes(), device->default_pool.device, begin));
    }
  }
  for (const auto& [begin, pinned] : its.host.all()) {
    const bool registered = pinned.how == HostMemory::How::kRegistered;
    its.find(fmt::format("leak: {} bytes of host memory at {:#x} are still {}",
                         pinned.range.size_bytes(), begin,
                         registered ? "registered" : "allocated"));
  }
  for (const auto& stream : its.streams) {
    if (!stream->destroyed && !stream->implicit)
      its.find(fmt::format("leak: stream {}", stream->actor));
    if (!Machine::idle(stream.get())) {
      its.find(fmt::format("under way at the end: {} on stream {}", stream->queue.back()->what,
                           stream->actor));
    }
  }
  for (const auto& [handle, event] : its.events) {
    if (!event->destroyed) its.find("leak: an event");
  }
  for (const Pool& pool : its.pools) {
    if (!pool.destroyed) its.find("leak: a memory pool");
  }
}

}  // namespace

void reset(std::uint64_t seed, const Options& options) { machine().reset(seed, options); }

void fail_call(std::uint64_t n, cudaError_t error) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  its.fail_call_at = its.calls + n;
  its.call_error = error;
}

void fail_completion(std::uint64_t n, cudaError_t error) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  its.fail_completion_at = its.completions + n;
  its.completion_error = error;
}

void lose_device(cudaError_t error) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  for (std::size_t i = 0; i < its.devices.size(); ++i) its.fail_device(static_cast<int>(i), error);
}

std::string struck() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return its.struck;
}

std::uint64_t calls() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return its.calls;
}

std::uint64_t completions() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return its.completions;
}

std::vector<std::string> take_findings() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return std::exchange(its.findings, {});
}

std::vector<std::string> report() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  for (const auto& device : its.devices) {
    if (device->sticky != cudaSuccess) its.write_late(*device);
  }
  find_leaks(its);
  return std::exchange(its.findings, {});
}

int contexts() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return static_cast<int>(std::count_if(its.devices.begin(), its.devices.end(),
                                        [](const auto& device) { return device->has_context; }));
}

std::uint64_t trace_hash() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return its.trace;
}

std::chrono::nanoseconds now() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  return std::chrono::nanoseconds(its.now_ns);
}

std::optional<std::chrono::nanoseconds> next_completion() {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  const auto end = its.next_end();
  if (!end) return std::nullopt;
  return std::chrono::nanoseconds(*end);
}

void advance_to(std::chrono::nanoseconds time) {
  Machine& its = machine();
  Machine::Lock lock(its.mutex);
  const auto until = static_cast<std::uint64_t>(time.count());
  while (its.step(lock, until)) {
  }
  its.now_ns = std::max(its.now_ns, until);
}

void host_reads(const void* address, std::size_t size_bytes) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  its.host_access(range_of(address, size_bytes), false, "the host");
}

std::byte* device_bytes(const void* address, std::size_t size_bytes) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  const Range range = range_of(address, size_bytes);
  DeviceState* device = its.device_of(range.begin);
  const Allocation* allocation = device == nullptr ? nullptr : device->memory.find(range.begin);
  if (allocation == nullptr || !allocation->range.contains(range)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} bytes at {} are not of one allocation", size_bytes, address));
  }
  return device->memory.bytes(range.begin);
}

void set_capturing(cudaStream_t stream, bool capturing) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  stream->capturing = capturing;
}

}  // namespace ziggurat::cuda_double
