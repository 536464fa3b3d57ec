// SPDX-License-Identifier: Apache-2.0
// tiers/pool/arena.h: keeps which ranges of one contiguous region are free. It allocates by first
// fit in the order of addresses, and merges free neighbours.
//
// Offsets only, no memory; not thread-safe. Addresses of allocations are a function of the calls
// alone. A call costs the logarithm of the number of free ranges.
#pragma once

#include <cstdint>
#include <optional>

#include "tiers/pool/free_ranges.h"

namespace ziggurat {

class Arena {
 public:
  Arena(std::uint64_t size_bytes, std::uint64_t alignment_bytes);

  /// Takes a free range of `size_bytes` (rounded up to the alignment) and returns its offset, or
  /// nothing if no range is long enough.
  std::optional<std::uint64_t> allocate(std::uint64_t size_bytes);
  /// Takes a free range wholly inside `within`, whose ends are multiples of the alignment: at its
  /// lowest or at its highest possible place.
  enum class Side : std::uint8_t { kLowest, kHighest };
  std::optional<std::uint64_t> allocate_within(std::uint64_t size_bytes, FreeRange within,
                                               Side side);
  /// Takes a given range, all of which must be free.
  void take(std::uint64_t offset_bytes, std::uint64_t size_bytes);
  /// Gives back a range exactly as it was allocated.
  void free(std::uint64_t offset_bytes, std::uint64_t size_bytes);

  std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  std::uint64_t largest_free_bytes() const noexcept { return free_ranges_.longest_bytes(); }

 private:
  std::uint64_t size_bytes_;
  std::uint64_t alignment_bytes_;
  std::uint64_t free_bytes_;
  FreeRanges free_ranges_;  // no two of them touch
};

/// Returns the bytes that an array of `size_bytes` should occupy so that arrays side by side are
/// not congruent modulo 2 MiB.
///
/// Equal arrays of a whole number of huge pages, streamed together, would fall on the same cache
/// sets and (below 4 KiB alignment) suffer from store-to-load aliasing. So a large array occupies
/// an *odd* number of alignment units. Its neighbours then begin at an odd stride, which is coprime
/// to the number of units in 2 MiB, so that all of these residues are used before one repeats (512
/// at 4 KiB). This costs at most one unit, which a sum of sizes against a budget must count. Arrays
/// below 256 KiB are not changed.
std::uint64_t staggered_bytes(std::uint64_t size_bytes, std::uint64_t alignment_bytes) noexcept;

}  // namespace ziggurat
