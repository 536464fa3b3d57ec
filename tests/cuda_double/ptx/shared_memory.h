// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/shared_memory.h: shared memory of a block, and accesses of its threads that
// no barrier keeps apart.
//
// Two accesses have an order if a barrier of the block, or, in one warp, a synchronization of the
// warp lies between them. Without one, a write and another thread's access race.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ziggurat::cuda_double::ptx {

/// Who accesses: the thread in its block, and how often its warp was synchronized.
struct Accessor {
  std::uint32_t thread;
  std::uint32_t warp_syncs;
};

class SharedMemory {
 public:
  explicit SharedMemory(std::uint32_t size_bytes) : bytes_(size_bytes), notes_(size_bytes) {}

  /// For a new block: other contents, no past.
  void clear(std::uint64_t poison_seed);
  /// All threads have met.
  void barrier() noexcept { ++barriers_; }

  // Errors: Fault, for an address outside, one that is not aligned, and for a race.
  const std::byte* read(std::uint64_t offset, std::uint32_t size_bytes, Accessor who);
  std::byte* write(std::uint64_t offset, std::uint32_t size_bytes, Accessor who);
  /// Atomic operations do not race with each other.
  std::byte* update(std::uint64_t offset, std::uint32_t size_bytes, Accessor who);

  std::uint32_t size_bytes() const noexcept { return static_cast<std::uint32_t>(bytes_.size()); }

 private:
  struct Touch {
    std::uint32_t barriers = ~std::uint32_t{0};  // never
    std::uint32_t warp_syncs = 0;
    std::uint16_t thread = 0;
    bool by_several = false;  // of more than one warp
    bool atomic = false;
  };
  struct Note {
    Touch write;
    Touch read;
  };
  void check(std::uint64_t offset, std::uint32_t size_bytes) const;
  bool ordered(const Touch& before, Accessor who) const noexcept;
  [[noreturn]] static void race(std::uint64_t offset, const char* before, const Touch& touch,
                                const char* now, Accessor who);
  void touch(Touch& touch, Accessor who, bool atomic) const noexcept;

  std::vector<std::byte> bytes_;
  std::vector<Note> notes_;
  std::uint32_t barriers_ = 0;
};

}  // namespace ziggurat::cuda_double::ptx
