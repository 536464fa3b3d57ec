// SPDX-License-Identifier: Apache-2.0
// tests/support/aligned_memory.h: memory that direct transfers accept, freed with its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "base/bytes.h"

namespace ziggurat::test {

/// Page-aligned and zeroed.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::uint64_t size_bytes)
      : bytes_(static_cast<std::byte*>(std::aligned_alloc(4096, round_up(size_bytes, 4096))),
               size_bytes) {
    std::memset(bytes_.data(), 0, bytes_.size());
  }
  ~AlignedMemory() { std::free(bytes_.data()); }
  AlignedMemory(const AlignedMemory&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace ziggurat::test
