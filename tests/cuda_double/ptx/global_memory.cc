// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/global_memory.cc: see global_memory.h.
#include "tests/cuda_double/ptx/global_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double::ptx {

GlobalMemory::Granule& GlobalMemory::load(std::uint64_t number, std::uint64_t address) {
  Granule& granule = granules_[number];
  if (granule.bytes != nullptr) return granule;
  const std::uint64_t first = number * kGranule;
  Range valid{};
  if (device_.memory.owns(address)) {
    if (const Allocation* allocation = device_.memory.find(address)) {
      valid = allocation->range;
      granule.bytes = device_.memory.bytes(first);
    }
  } else {
    // Pinned memory "can also be accessed from the device using the host pointer"
    // (cuda_runtime_api.h:4952-4954).
    for (const auto& [begin, pinned] : machine_.host.all()) {
      if (!pinned.range.contains({address, address + 1})) continue;
      valid = pinned.range;
      granule.bytes = reinterpret_cast<std::byte*>(first);
    }
  }
  granule.begin = std::max<std::uint64_t>(first, valid.begin);
  granule.end = std::min<std::uint64_t>(first + kGranule, valid.end);
  return granule;
}

void GlobalMemory::refuse(std::uint64_t address, std::uint32_t size_bytes) const {
  if (address % size_bytes != 0) {
    throw Fault(cudaErrorMisalignedAddress,
                fmt::format("{} bytes at {:#x} are not aligned", size_bytes, address));
  }
  throw Fault(cudaErrorIllegalAddress, fmt::format("{} bytes at {:#x}: {}", size_bytes, address,
                                                   device_.memory.nearest(address)));
}

void GlobalMemory::refuse_race(std::uint64_t address, bool writes) const {
  throw Fault(cudaErrorLaunchFailure,
              fmt::format("a race between blocks: it {} {:#x} ({}), which another block {}; blocks "
                          "have no order",
                          writes ? "writes" : "reads", address, device_.memory.nearest(address),
                          writes ? "reads or writes" : "writes"));
}

void GlobalMemory::turn_over(Granule& granule) const noexcept {
  for (std::size_t writes = 0; writes < 2; ++writes) {
    for (std::size_t strong = 0; strong < 2; ++strong) {
      Bits& now = granule.now[writes][strong];
      for (std::size_t word = 0; word < now.size(); ++word) {
        granule.before[writes][strong][word] |= now[word];
      }
      now = {};
    }
  }
  granule.block = block_;
}

std::uint64_t GlobalMemory::all(const Granule& granule, bool writes, std::uint64_t word) noexcept {
  const std::size_t way = writes ? 1 : 0;
  return granule.now[way][0][word] | granule.now[way][1][word] | granule.before[way][0][word] |
         granule.before[way][1][word];
}

void GlobalMemory::append_accesses(std::vector<Access>& accesses) const {
  std::vector<std::uint64_t> numbers;
  numbers.reserve(granules_.size());
  for (const auto& [number, granule] : granules_) numbers.push_back(number);
  std::sort(numbers.begin(), numbers.end());
  for (const bool writes : {false, true}) {
    Range run{};
    const auto end_run = [&] {
      if (run.size_bytes() > 0) accesses.push_back({run, writes});
    };
    for (const std::uint64_t number : numbers) {
      const Granule& granule = granules_.at(number);
      for (std::uint64_t at = 0; at < kGranule; ++at) {
        const std::uint64_t word = all(granule, writes, at / 64);
        const bool whole = at % 64 == 0 && (word == 0 || ~word == 0);
        const std::uint64_t length = whole ? 64 : 1;
        const std::uint64_t address = number * kGranule + at;
        at += length - 1;
        if ((word >> (at % 64) & 1) == 0) continue;
        if (run.end != address) {
          end_run();
          run = {address, address};
        }
        run.end = address + length;
      }
    }
    end_run();
  }
}

}  // namespace ziggurat::cuda_double::ptx
