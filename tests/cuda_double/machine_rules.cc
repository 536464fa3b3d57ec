// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/machine_rules.cc: the machine's findings, lost devices, and what is under way.
#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_double/machine.h"

namespace ziggurat::cuda_double {

void Machine::find(std::string text) { findings.push_back(std::move(text)); }

void Machine::fail_device(int device, cudaError_t error) {
  cudaError_t& sticky = devices[static_cast<std::size_t>(device)]->sticky;
  if (sticky == cudaSuccess) sticky = error;
  changed_.notify_all();
}

DeviceState* Machine::device_of(std::uintptr_t address) {
  for (const auto& device : devices) {
    if (device->memory.owns(address)) return device.get();
  }
  return nullptr;
}

const Operation* Machine::under_way(Range range, bool writing_only) const {
  for (const auto& stream : streams) {
    for (const OperationRef& operation : stream->queue) {
      if (operation->state == Operation::State::kDone) continue;
      const bool touches = std::any_of(
          operation->accesses.begin(), operation->accesses.end(), [&](const Access& access) {
            return access.range.overlaps(range) && (access.writes || !writing_only);
          });
      if (touches) return operation.get();
    }
  }
  return nullptr;
}

void Machine::host_access(Range range, bool writes, const std::string& what) {
  host_knows.set(kHost, ++host_tick);
  const Act act{kHost, host_tick, host_knows, what};
  if (const auto race = history.add({range, writes}, act)) find(*race);
  for (const auto& stream : streams) {
    for (const OperationRef& operation : stream->queue) {
      for (const Access& access : operation->accesses) {
        if (!access.range.overlaps(range) || !(access.writes || writes)) continue;
        find(fmt::format("{} while {} on stream {} is under way", what, operation->what,
                         stream->actor));
        return;
      }
    }
  }
}

void Machine::synchronized(int device) {
  DeviceState& its = *devices[static_cast<std::size_t>(device)];
  const auto trim = [&](Pool& pool) {
    if (pool.device != device || pool.reserved <= pool.threshold) return;
    const std::uint64_t kept = std::max(pool.used, pool.threshold);
    its.reserved_bytes -= pool.reserved - kept;
    pool.reserved = kept;
  };
  trim(its.default_pool);
  for (Pool& pool : pools) trim(pool);
}

}  // namespace ziggurat::cuda_double
