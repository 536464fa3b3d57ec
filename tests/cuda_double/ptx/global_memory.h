// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/global_memory.h: a kernel's accesses to memory of the device, and to pinned
// memory of the host: checked against allocations, and remembered byte by byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "tests/cuda_double/machine.h"

namespace ziggurat::cuda_double::ptx {

/// How an access counts when another block of the launch touches the same byte, since blocks have
/// no order: plain accesses race with each other if one writes; strong ones (atomic, volatile,
/// relaxed) race with plain ones only.
enum class Strength : std::uint8_t { kPlain, kStrong };

class GlobalMemory {
 public:
  GlobalMemory(Machine& machine, DeviceState& device) : machine_(machine), device_(device) {}

  /// Where the bytes are. `size_bytes` is a power of two up to 32. Errors: Fault, for a misaligned
  /// or illegal address, and for a race with another block.
  std::byte* read(std::uint64_t address, std::uint32_t size_bytes,
                  Strength strength = Strength::kPlain) {
    Granule& granule = find(address, size_bytes);
    touch(granule, address, size_bytes, false, strength);
    return granule.bytes + address % kGranule;
  }
  std::byte* write(std::uint64_t address, std::uint32_t size_bytes,
                   Strength strength = Strength::kPlain) {
    Granule& granule = find(address, size_bytes);
    touch(granule, address, size_bytes, true, strength);
    return granule.bytes + address % kGranule;
  }

  /// What comes is the next block's. Not told: all is one block's.
  void begin_block() noexcept { ++block_; }
  /// Kernels that fence order their blocks themselves, which is not followed.
  void trust_blocks() noexcept { blocks_trusted_ = true; }

  /// All that was touched so far, as ranges.
  void append_accesses(std::vector<Access>& accesses) const;

 private:
  // An allocation begins at a multiple of it, and shares none with another.
  static constexpr std::uint64_t kGranule = DeviceMemory::kAlignment;
  using Bits = std::array<std::uint64_t, kGranule / 64>;
  /// By [writes][strong].
  using Touched = std::array<std::array<Bits, 2>, 2>;
  struct Granule {
    std::byte* bytes = nullptr;
    std::uint64_t begin = 0, end = 0;  // valid addresses
    std::uint64_t block = 0;           // whose `now` is
    Touched now{}, before{};           // `before`: by other blocks
  };

  void touch(Granule& granule, std::uint64_t address, std::uint32_t size_bytes, bool writes,
             Strength strength) {
    if (granule.block != block_) turn_over(granule);
    const std::uint64_t word = address % kGranule / 64;
    const std::uint64_t mask = ((std::uint64_t{1} << size_bytes) - 1) << (address % 64);
    const bool strong = strength == Strength::kStrong;
    const Touched& others = granule.before;
    std::uint64_t conflicts = others[1][0][word];
    if (!strong) conflicts |= others[1][1][word];
    if (writes) conflicts |= others[0][0][word];
    if (writes && !strong) conflicts |= others[0][1][word];
    if ((conflicts & mask) != 0 && !blocks_trusted_) refuse_race(address, writes);
    granule.now[writes ? 1 : 0][strong ? 1 : 0][word] |= mask;
  }
  void turn_over(Granule& granule) const noexcept;
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
  [[noreturn]] void refuse_race(std::uint64_t address, bool writes) const;
  static std::uint64_t all(const Granule& granule, bool writes, std::uint64_t word) noexcept;

  struct Cached {
    std::uint64_t number = ~std::uint64_t{0};
    Granule* granule = nullptr;
  };
  Machine& machine_;
  DeviceState& device_;
  std::uint64_t block_ = 0;
  bool blocks_trusted_ = false;
  std::unordered_map<std::uint64_t, Granule> granules_;
  std::array<Cached, 256> cache_;
};

}  // namespace ziggurat::cuda_double::ptx
