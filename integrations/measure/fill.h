// SPDX-License-Identifier: Apache-2.0
// integrations/measure/fill.h: makes what the benchmark writes, so that everything that is read can
// be checked, and looks at samples of files that it did not write.
//
// A page of 4 KiB has a stamp (which file, which page of it, which pass wrote it) and then bits
// that no drive can compress, made from (file, slot) by a counter. A write buffer keeps its slots
// and only its stamps change between writes, so that filling costs next to nothing beside the
// transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat::measure {

inline constexpr std::size_t kPageBytes = 4096;

/// Makes the bits of every page of `memory` (whole pages). Page i gets slot first_slot + i.
void make_pages(std::span<std::byte> memory, std::uint64_t file_seed, std::uint32_t first_slot);

/// A pass over a file, which writes its pages.
struct Pass {
  std::uint64_t file_seed = 0;
  std::uint32_t number = 0;
};

/// Stamps pages that make_pages() made as the pages of the file from `offset_bytes` on, written by
/// `pass`.
void stamp_pages(std::span<std::byte> memory, const Pass& pass, std::uint64_t offset_bytes);

/// Counts the pages of `memory`, read from `offset_bytes` on, that no pass from `first_number` to
/// `last.number` wrote there. Compares every byte.
std::size_t wrong_pages(std::span<const std::byte> memory, const Pass& last,
                        std::uint32_t first_number, std::uint64_t offset_bytes);

/// Counts of pages that a drive could shorten if it compresses or drops repetition.
struct SampleFacts {
  std::uint64_t pages = 0;
  std::uint64_t constant_pages = 0;  ///< one byte value throughout, which is mostly zero
  std::uint64_t thin_pages = 0;   ///< under kThinEntropy bits per byte, or with words that repeat
  std::uint64_t wrong_pages = 0;  ///< different from what was written there
  bool verified = false;          ///< wrong_pages was counted, since the file is ours

  void add(const SampleFacts& other) noexcept;
};

/// The order-0 entropy in bits per byte under which a page is thin: it would shrink by a quarter or
/// more.
inline constexpr double kThinEntropy = 6.0;

/// Counts what every page of `memory` looks like.
SampleFacts look_at(std::span<const std::byte> memory);

}  // namespace ziggurat::measure
