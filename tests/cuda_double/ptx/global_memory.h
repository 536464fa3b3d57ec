// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/global_memory.h: a kernel's accesses to memory of the device, and to pinned
// memory of the host: checked against allocations, and remembered byte by byte.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "tests/cuda_double/machine.h"

namespace ziggurat::cuda_double::ptx {

class GlobalMemory {
 public:
  GlobalMemory(Machine& machine, DeviceState& device) : machine_(machine), device_(device) {}

  /// Where the bytes are. `size_bytes` is a power of two up to 16. Errors: Fault, misaligned or
  /// illegal address.
  std::byte* read(std::uint64_t address, std::uint32_t size_bytes) {
    Granule& granule = find(address, size_bytes);
    mark(granule.read, address, size_bytes);
    return granule.bytes + address % kGranule;
  }
  std::byte* write(std::uint64_t address, std::uint32_t size_bytes) {
    Granule& granule = find(address, size_bytes);
    mark(granule.written, address, size_bytes);
    return granule.bytes + address % kGranule;
  }

  /// All that was touched so far, as ranges.
  void append_accesses(std::vector<Access>& accesses) const;

 private:
  // An allocation begins at a multiple of it, and shares none with another.
  static constexpr std::uint64_t kGranule = DeviceMemory::kAlignment;
  using Bits = std::array<std::uint64_t, kGranule / 64>;
  struct Granule {
    std::byte* bytes = nullptr;
    std::uint64_t begin = 0, end = 0;  // valid addresses
    Bits read{}, written{};
  };

  static void mark(Bits& bits, std::uint64_t address, std::uint32_t size_bytes) {
    const std::uint64_t at = address % kGranule;
    bits[at / 64] |= ((std::uint64_t{1} << size_bytes) - 1) << (at % 64);
  }
  Granule& find(std::uint64_t address, std::uint32_t size_bytes) {
    const std::uint64_t number = address / kGranule;
    Cached& cached = cache_[number % cache_.size()];
    if (cached.number != number) cached = {number, &load(number, address)};
    Granule& granule = *cached.granule;
    if (address < granule.begin || address + size_bytes > granule.end ||
        address % size_bytes != 0) {
      refuse(address, size_bytes);
    }
    return granule;
  }
  Granule& load(std::uint64_t number, std::uint64_t address);
  [[noreturn]] void refuse(std::uint64_t address, std::uint32_t size_bytes) const;

  struct Cached {
    std::uint64_t number = ~std::uint64_t{0};
    Granule* granule = nullptr;
  };
  Machine& machine_;
  DeviceState& device_;
  std::unordered_map<std::uint64_t, Granule> granules_;
  std::array<Cached, 256> cache_;
};

}  // namespace ziggurat::cuda_double::ptx
