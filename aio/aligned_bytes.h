// SPDX-License-Identifier: Apache-2.0
// aio/aligned_bytes.h: memory for one transfer, aligned as direct transfers need it, and not
// zeroed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace ziggurat {

/// Memory of 128 KiB or more gets pages of its own: malloc's heap would keep freed memory in pieces
/// that are each a little too small for the next transfer. Forked children do not get these pages.
/// Move-only.
class AlignedBytes {
 public:
  static constexpr std::uint64_t kAlignment = 4096;

  /// Makes memory that begins `lead_bytes` after a multiple of kAlignment. Errors:
  /// kResourceExhausted.
  explicit AlignedBytes(std::uint64_t size_bytes, std::uint64_t lead_bytes = 0);
  std::span<std::byte> span() const noexcept { return {memory_.get() + lead_, size_}; }

 private:
  friend class AlignedPool;
  struct Release;
  using Memory = std::unique_ptr<std::byte, Release>;
  using Spare = std::vector<Memory>;
  struct Release {
    std::uint64_t mapped_bytes;  ///< 0 if the memory is malloc's
    std::weak_ptr<Spare> pool;   ///< the pool that gets the memory back
    void operator()(std::byte* memory) const noexcept;
  };
  static Memory allocate(std::uint64_t size_bytes);
  AlignedBytes(Memory memory, std::uint64_t size_bytes, std::uint64_t lead_bytes)
      : memory_(std::move(memory)), lead_(lead_bytes), size_(size_bytes) {}

  Memory memory_;
  std::size_t lead_;
  std::size_t size_;
};

/// Makes AlignedBytes one after the other, from memory that earlier ones have given back: pages
/// that are new each time cost a processor more than the work on them. Holds no more memory than
/// was in use at one time. For one thread.
class AlignedPool {
 public:
  /// Makes bytes as AlignedBytes' constructor does. They may outlive the pool.
  AlignedBytes take(std::uint64_t size_bytes, std::uint64_t lead_bytes = 0);

 private:
  std::shared_ptr<AlignedBytes::Spare> spare_ = std::make_shared<AlignedBytes::Spare>();
};

}  // namespace ziggurat
