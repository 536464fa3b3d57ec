// SPDX-License-Identifier: Apache-2.0
// base/absent_memory.h: addresses without memory. A twin in virtual time has its bytes there: they
// are counted, cut and passed on like others, but nothing may read or write them.
//
// Whatever moves bytes (a simulated drive, simulated ranks) asks lacks() and moves none. Any other
// access is a mistake, and the process gets a fault at once. Parts whose bytes decide something are
// given memory (make_real). For one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

namespace ziggurat {

class AbsentMemory {
 public:
  /// Reserves addresses for reserve() to hand out. Errors: kResourceExhausted if the machine does
  /// not give as many.
  explicit AbsentMemory(std::uint64_t size_bytes);
  ~AbsentMemory();
  AbsentMemory(const AbsentMemory&) = delete;
  AbsentMemory& operator=(const AbsentMemory&) = delete;

  /// Returns addresses for `size_bytes`, aligned to 2 MiB. They are not given back before the end.
  /// Errors: kResourceExhausted if they do not fit.
  std::span<std::byte> reserve(std::uint64_t size_bytes);
  /// Gives the pages of `bytes` memory, which holds zeros. Errors: kResourceExhausted.
  void make_real(std::span<std::byte> bytes);
  /// Returns whether the byte at `address` is one of these without memory.
  bool lacks(const void* address) const noexcept;

 private:
  std::span<std::byte> all_;
  std::uint64_t used_bytes_ = 0;
  std::map<std::uintptr_t, std::uintptr_t> real_;  // by begin; none overlap
};

}  // namespace ziggurat
