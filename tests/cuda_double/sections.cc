// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/sections.cc: the CPU in the place of a kernel.
#include <algorithm>

#include "base/error.h"
#include "tests/cuda_double/api.h"

namespace ziggurat::cuda_double {
namespace {

constexpr std::uint64_t kBeginNs = 500;

std::vector<Access> accesses_of(std::span<const SectionMemory> memory) {
  std::vector<Access> accesses;
  for (const SectionMemory& its : memory)
    accesses.push_back({range_of(its.address, its.size_bytes), its.writes});
  return accesses;
}

/// Whether one allocation of the stream's device holds the range.
bool holds(DeviceState& device, Range range) {
  const Allocation* allocation =
      device.memory.owns(range.begin) ? device.memory.find(range.begin) : nullptr;
  return allocation != nullptr && allocation->range.contains(range);
}

}  // namespace

cudaError_t begin_section(cudaStream_t handle, std::span<const SectionMemory> memory) {
  constexpr const char* kName = "begin_section";
  return call(kName, [&](Machine& its, Machine::Lock& lock) {
    CUstream_st* stream = stream_of(its, handle, kName);
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    DeviceState& device = *its.devices[static_cast<std::size_t>(stream->device)];
    std::vector<Access> accesses = accesses_of(memory);
    for (const Access& access : accesses) {
      if (holds(device, access.range)) continue;
      return refuse(its, cudaErrorInvalidValue, "{}: {:#x} is {}", kName, access.range.begin,
                    device.memory.nearest(access.range.begin));
    }
    Operation section{.what = "a section of the CPU", .duration_ns = kBeginNs};
    section.accesses = accesses;
    section.is_section = true;
    its.submit(stream, std::move(section));
    const cudaError_t error = its.wait_for_begin(lock, Machine::last_of(stream));
    if (error != cudaSuccess) return error;
    for (const Access& access : accesses) device.memory.open(access.range);
    return cudaSuccess;
  });
}

void end_section(cudaStream_t handle) {
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  CUstream_st* stream = stream_of(its, handle, "end_section");
  if (stream == nullptr || stream->queue.empty() || !stream->queue.front()->is_section ||
      stream->queue.front()->state != Operation::State::kOnHost)
    throw Error(ErrorCode::kInvalidArgument, "end_section(): the stream is in no section");
  DeviceState& device = *its.devices[static_cast<std::size_t>(stream->device)];
  const OperationRef section = stream->queue.front();
  for (const Access& access : section->accesses) device.memory.close(access.range);
  its.end(*section);
}

std::byte* section_view(const void* address, std::size_t size_bytes) {
  static_cast<void>(device_bytes(address, size_bytes));  // it checks them
  Machine& its = machine();
  const Machine::Lock lock(its.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  return its.device_of(begin)->memory.view(begin);
}

}  // namespace ziggurat::cuda_double
