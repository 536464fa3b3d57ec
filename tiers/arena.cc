// SPDX-License-Identifier: Apache-2.0
// tiers/arena.cc: the map of free ranges. It never holds two neighbours, so a range's neighbours
// are all there is to merge.
#include "tiers/arena.h"

#include <algorithm>
#include <iterator>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {

Arena::Arena(std::uint64_t size_bytes, std::uint64_t alignment_bytes)
    : size_bytes_(size_bytes / alignment_bytes * alignment_bytes),
      alignment_bytes_(alignment_bytes),
      free_bytes_(size_bytes_) {
  if (size_bytes_ > 0) free_ranges_.emplace(0, size_bytes_);
}

std::optional<std::uint64_t> Arena::allocate(std::uint64_t size_bytes) {
  ZIGGURAT_CHECK(size_bytes > 0, "an allocation of nothing");
  if (size_bytes > free_bytes_) return std::nullopt;  // also keeps round_up from overflowing
  const std::uint64_t size = round_up(size_bytes, alignment_bytes_);
  const auto range = std::find_if(free_ranges_.begin(), free_ranges_.end(),
                                  [size](const auto& entry) { return entry.second >= size; });
  if (range == free_ranges_.end()) return std::nullopt;
  const auto [offset, length] = *range;
  const auto next = free_ranges_.erase(range);
  if (length > size) free_ranges_.emplace_hint(next, offset + size, length - size);
  free_bytes_ -= size;
  return offset;
}

void Arena::free(std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  const std::uint64_t size = round_up(size_bytes, alignment_bytes_);
  std::uint64_t begin = offset_bytes;
  std::uint64_t end = offset_bytes + size;
  ZIGGURAT_CHECK(size > 0 && begin % alignment_bytes_ == 0 && end <= size_bytes_,
                 "range [{}, {}) of an arena of {}", begin, end, size_bytes_);
  auto next = free_ranges_.lower_bound(begin);
  if (next != free_ranges_.end()) {
    ZIGGURAT_CHECK(end <= next->first, "[{}, {}) is freed twice: {} is free", begin, end,
                   next->first);
    if (end == next->first) {
      end += next->second;
      next = free_ranges_.erase(next);
    }
  }
  if (next != free_ranges_.begin()) {
    const auto before = std::prev(next);
    ZIGGURAT_CHECK(before->first + before->second <= begin, "[{}, {}) is freed twice", begin, end);
    if (before->first + before->second == begin) {
      begin = before->first;
      next = free_ranges_.erase(before);
    }
  }
  free_ranges_.emplace_hint(next, begin, end - begin);
  free_bytes_ += size;
}

std::uint64_t Arena::largest_free_bytes() const noexcept {
  std::uint64_t largest = 0;
  for (const auto& [offset, length] : free_ranges_) largest = std::max(largest, length);
  return largest;
}

std::uint64_t staggered_bytes(std::uint64_t size_bytes, std::uint64_t alignment_bytes) noexcept {
  constexpr std::uint64_t kLarge = 256 * kKiB;
  const std::uint64_t units = (size_bytes + alignment_bytes - 1) / alignment_bytes;
  return (size_bytes >= kLarge ? units | 1 : units) * alignment_bytes;
}

}  // namespace ziggurat
