// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/machine_rules.cc: the machine's findings, lost devices, and what is under way.
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tests/cuda_double/machine.h"

namespace ziggurat::cuda_double {

void Machine::find(std::string text) { findings.push_back(std::move(text)); }

void Machine::fail_device(int device, cudaError_t error) {
  DeviceState& its = *devices[static_cast<std::size_t>(device)];
  if (its.sticky != cudaSuccess) return;
  its.sticky = error;
  for (const auto& stream : streams) {
    if (stream->device != device || stream->queue.empty()) continue;
    const Operation& head = *stream->queue.front();
    if (head.state != Operation::State::kQueued) continue;
    for (const Access& access : head.accesses) {
      const bool on_host = device_of(access.range.begin) == nullptr;
      if (access.writes && on_host) its.late_writes.push_back(access.range);
    }
  }
  changed_.notify_all();
}

void Machine::write_late(DeviceState& device) {
  for (Range& range : device.late_writes) {
    if (range.size_bytes() == 0) continue;
    // By the kernel's hand, which says if the memory is gone where ours would end the process.
    std::vector<std::byte> bytes(std::min<std::size_t>(range.size_bytes(), 4096));
    fill_with_poison(bytes.data(), bytes.size(), mix(seed, ++late_write_count_));
    const iovec from{bytes.data(), bytes.size()};
    const iovec to{reinterpret_cast<void*>(range.begin), bytes.size()};
    if (process_vm_writev(getpid(), &from, 1, &to, 1, 0) >= 0 || errno != EFAULT) continue;
    find(
        fmt::format("{} bytes at {:#x} were unmapped, but a copy of the lost device may still "
                    "write there (fix: keep the memory to the end of the process)",
                    range.size_bytes(), range.begin));
    range = {};
  }
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
