// SPDX-License-Identifier: Apache-2.0
// aio/aligned_bytes.h: memory for one transfer, placed as direct transfers want it, and not zeroed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace ziggurat {

/// From 128 KiB on pages of its own, where malloc's heap would keep what is freed in pieces, each a
/// little too small for the next transfer; those are not in forked children. Move-only.
class AlignedBytes {
 public:
  static constexpr std::uint64_t kAlignment = 4096;

  /// Begins `lead_bytes` behind a multiple of kAlignment. Errors: kResourceExhausted.
  explicit AlignedBytes(std::uint64_t size_bytes, std::uint64_t lead_bytes = 0);
  std::span<std::byte> span() const noexcept { return {memory_.get() + lead_, size_}; }

 private:
  friend class AlignedPool;
  struct Release;
  using Memory = std::unique_ptr<std::byte, Release>;
  using Spare = std::vector<Memory>;
  struct Release {
    std::uint64_t mapped_bytes;  ///< 0: malloc's
    std::weak_ptr<Spare> pool;   ///< that has it back
    void operator()(std::byte* memory) const noexcept;
  };
  static Memory allocate(std::uint64_t size_bytes);
  AlignedBytes(Memory memory, std::uint64_t size_bytes, std::uint64_t lead_bytes)
      : memory_(std::move(memory)), lead_(lead_bytes), size_(size_bytes) {}

  Memory memory_;
  std::size_t lead_;
  std::size_t size_;
};

/// AlignedBytes one after the other: what one has given back is the next one's, since pages that
/// are new each time cost a processor more than what is done with them. Holds no more than was in
/// use at a time. One thread.
class AlignedPool {
 public:
  /// As AlignedBytes' constructor; what it makes may outlive the pool.
  AlignedBytes take(std::uint64_t size_bytes, std::uint64_t lead_bytes = 0);

 private:
  std::shared_ptr<AlignedBytes::Spare> spare_ = std::make_shared<AlignedBytes::Spare>();
};

}  // namespace ziggurat
