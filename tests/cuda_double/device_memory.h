// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/device_memory.h: memory of one device: addresses that fault when the CPU
// touches them, and the bytes behind them.
//
// Addresses are inaccessible pages; the bytes lie elsewhere, at the same offset, and with a view a
// third time, inaccessible but where it is open. Addresses are not used again until all have been,
// so that a late access finds no innocent neighbour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "tests/cuda_double/order.h"

namespace ziggurat::cuda_double {

struct Pool;

struct Allocation {
  Range range;
  Pool* pool = nullptr;  ///< null: cudaMalloc's, or a module's
  std::string freed_by;  ///< a cudaFreeAsync that was submitted; empty: none
  bool of_module = false;
};

class DeviceMemory {
 public:
  /// "Any address ... is aligned to at least 256 bytes" (CUDA C++ Programming Guide, 5.3.2).
  static constexpr std::uint64_t kAlignment = 512;

  DeviceMemory(std::uint64_t capacity_bytes, std::uint64_t seed, bool has_view);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// New addresses, bytes poisoned. The budget is the caller's to keep. Null: no room left.
  Allocation* allocate(std::uint64_t size_bytes);
  void release(Allocation& allocation);
  /// Fills with what no program wrote: whole, or the ends of what is long.
  void poison(Range range);

  bool owns(std::uintptr_t address) const noexcept {
    return addresses_.contains({address, address + 1});
  }
  /// The live allocation that holds the address; null: none.
  Allocation* find(std::uintptr_t address);
  /// "64 bytes past the end of the allocation of 1024 bytes at 0x..."
  std::string nearest(std::uintptr_t address) const;
  std::byte* bytes(std::uintptr_t address) const noexcept {
    return bytes_ + (address - addresses_.begin);
  }

  /// Where the CPU sees the address while its pages are open. Null: there is no view.
  std::byte* view(std::uintptr_t address) const noexcept {
    return view_ == nullptr ? nullptr : view_ + (address - addresses_.begin);
  }
  /// Opens the pages of a range in the view, or ends one open() of it.
  void open(Range range) { change_view(range, +1); }
  void close(Range range) { change_view(range, -1); }

  const std::map<std::uintptr_t, Allocation>& allocations() const noexcept { return allocations_; }

 private:
  void change_view(Range range, int by);
  /// Protects the pages of the view between two distances from its begin.
  void protect(std::uintptr_t begin, std::uintptr_t end, bool is_open);

  std::uint64_t seed_;
  Range addresses_;
  std::byte* bytes_ = nullptr;
  std::byte* view_ = nullptr;
  std::map<std::uintptr_t, int> opened_;  // how often, by page of the view
  std::uintptr_t next_;
  std::map<std::uintptr_t, Allocation> allocations_;  // by first address
};

/// 64 bits of which none is like another's: splitmix64.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept;
/// Fills with bytes that depend on the seed alone.
void fill_with_poison(std::byte* bytes, std::size_t size_bytes, std::uint64_t seed) noexcept;

}  // namespace ziggurat::cuda_double
