// SPDX-License-Identifier: Apache-2.0
// integrations/measure/fill.h: what the benchmark writes, so that whatever is read can be checked,
// and what a sample of somebody else's file says about itself.
//
// A page is 4 KiB: a stamp (which file, which page of it, written by which pass) and then bits that
// no drive can compress, made from (file, slot) by a counter. A write buffer keeps its slots; only
// stamps change between writes, so that filling costs next to nothing beside the transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ziggurat::measure {

inline constexpr std::size_t kPageBytes = 4096;

/// Makes the bits of every page of `memory` (whole pages). Page i gets slot first_slot + i.
void make_pages(std::span<std::byte> memory, std::uint64_t file_seed, std::uint32_t first_slot);

/// Which pass over the file wrote a page.
struct Pass {
  std::uint64_t file_seed = 0;
  std::uint32_t number = 0;
};

/// Stamps pages made by make_pages() as those from `offset_bytes` on, written by `pass`.
void stamp_pages(std::span<std::byte> memory, const Pass& pass, std::uint64_t offset_bytes);

/// Pages of `memory`, read from `offset_bytes`, that are not what some pass from `first_number` to
/// `last.number` wrote there: every byte is compared.
std::size_t wrong_pages(std::span<const std::byte> memory, const Pass& last,
                        std::uint32_t first_number, std::uint64_t offset_bytes);

/// What bytes look like to a drive that compresses or drops repetition. Sums over pages.
struct SampleFacts {
  std::uint64_t pages = 0;
  std::uint64_t constant_pages = 0;  ///< one byte value throughout: zeros, mostly
  std::uint64_t thin_pages = 0;      ///< under kThinEntropy bits a byte, or words that repeat
  std::uint64_t wrong_pages = 0;     ///< not what was written there
  bool verified = false;             ///< wrong_pages means something: the file is ours

  void add(const SampleFacts& other) noexcept;
};

/// Order-0 entropy under which a page counts as thin: it would shrink by a quarter and more.
inline constexpr double kThinEntropy = 6.0;

/// Looks at every page of `memory`.
SampleFacts look_at(std::span<const std::byte> memory);

}  // namespace ziggurat::measure
