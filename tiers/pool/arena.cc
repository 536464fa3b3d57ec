// SPDX-License-Identifier: Apache-2.0
// tiers/pool/arena.cc: the set of free ranges never holds two neighbours, so a freed range can be
// merged only with the ranges directly beside it.
#include "tiers/pool/arena.h"

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {

Arena::Arena(std::uint64_t size_bytes, std::uint64_t alignment_bytes)
    : size_bytes_(size_bytes / alignment_bytes * alignment_bytes),
      alignment_bytes_(alignment_bytes),
      free_bytes_(size_bytes_) {
  if (size_bytes_ > 0) free_ranges_.insert({0, size_bytes_});
}

std::optional<std::uint64_t> Arena::allocate(std::uint64_t size_bytes) {
  ZIGGURAT_CHECK(size_bytes > 0, "an allocation of nothing");
  if (size_bytes > free_bytes_) return std::nullopt;  // also keeps round_up from overflowing
  const std::uint64_t size = round_up(size_bytes, alignment_bytes_);
  const auto range = free_ranges_.first_of_at_least(size);
  if (!range) return std::nullopt;
  take(range->offset_bytes, size);
  return range->offset_bytes;
}

std::optional<std::uint64_t> Arena::allocate_within(std::uint64_t size_bytes, FreeRange within,
                                                    Side side) {
  ZIGGURAT_CHECK(size_bytes > 0, "an allocation of nothing");
  if (size_bytes > free_bytes_) return std::nullopt;
  const std::uint64_t size = round_up(size_bytes, alignment_bytes_);
  const auto offset = side == Side::kLowest ? free_ranges_.lowest_place(size, within)
                                            : free_ranges_.highest_place(size, within);
  if (offset) take(*offset, size);
  return offset;
}

void Arena::take(std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  const FreeRange taken{offset_bytes, round_up(size_bytes, alignment_bytes_)};
  const auto range = free_ranges_.before(offset_bytes + 1);
  ZIGGURAT_CHECK(range && taken.end() <= range->end(), "[{}, {}) is taken and not free",
                 taken.offset_bytes, taken.end());
  free_ranges_.erase(range->offset_bytes);
  if (range->offset_bytes < offset_bytes)
    free_ranges_.insert({range->offset_bytes, offset_bytes - range->offset_bytes});
  if (taken.end() < range->end()) free_ranges_.insert({taken.end(), range->end() - taken.end()});
  free_bytes_ -= taken.size_bytes;
}

void Arena::free(std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  const std::uint64_t size = round_up(size_bytes, alignment_bytes_);
  std::uint64_t begin = offset_bytes;
  std::uint64_t end = offset_bytes + size;
  ZIGGURAT_CHECK(size > 0 && begin % alignment_bytes_ == 0 && end <= size_bytes_,
                 "range [{}, {}) of an arena of {}", begin, end, size_bytes_);
  if (const auto next = free_ranges_.at_or_after(begin)) {
    ZIGGURAT_CHECK(end <= next->offset_bytes, "[{}, {}) is freed twice: {} is free", begin, end,
                   next->offset_bytes);
    if (end == next->offset_bytes) {
      end = next->end();
      free_ranges_.erase(next->offset_bytes);
    }
  }
  if (const auto before = free_ranges_.before(begin)) {
    ZIGGURAT_CHECK(before->end() <= begin, "[{}, {}) is freed twice", begin, end);
    if (before->end() == begin) {
      begin = before->offset_bytes;
      free_ranges_.erase(before->offset_bytes);
    }
  }
  free_ranges_.insert({begin, end - begin});
  free_bytes_ += size;
}

std::uint64_t staggered_bytes(std::uint64_t size_bytes, std::uint64_t alignment_bytes) noexcept {
  constexpr std::uint64_t kLarge = 256 * kKiB;
  const std::uint64_t units = (size_bytes + alignment_bytes - 1) / alignment_bytes;
  return (size_bytes >= kLarge ? units | 1 : units) * alignment_bytes;
}

}  // namespace ziggurat
