// SPDX-License-Identifier: Apache-2.0
// integrations/measure/fill.cc: makes the bits of a page from a counter, by a 64-bit finalizer, and
// stamps each page with 32 bytes.
#include "integrations/measure/fill.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/check.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kWords = kPageBytes / sizeof(std::uint64_t);
constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15U;  // odd, so that no two counters are the same

struct Stamp {
  std::uint64_t file_seed;
  std::uint64_t page;
  std::uint32_t pass;
  std::uint32_t slot;
  std::uint64_t check;
};
constexpr std::size_t kStampWords = sizeof(Stamp) / sizeof(std::uint64_t);
static_assert(sizeof(Stamp) == 32);

// Returns the output function of Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
// generators".
constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

constexpr std::uint64_t word_of(std::uint64_t file_seed, std::uint32_t slot,
                                std::size_t index) noexcept {
  return mixed(file_seed + kStep * (static_cast<std::uint64_t>(slot) * kWords + index + 1));
}

constexpr std::uint64_t check_of(const Stamp& stamp) noexcept {
  return mixed(stamp.file_seed ^ mixed(stamp.page) ^
               mixed((static_cast<std::uint64_t>(stamp.pass) << 32) | stamp.slot));
}

bool page_is_right(const std::byte* page, const Pass& last, std::uint32_t first_number,
                   std::uint64_t number) {
  Stamp stamp;
  std::memcpy(&stamp, page, sizeof(stamp));
  if (stamp.file_seed != last.file_seed || stamp.page != number || stamp.pass < first_number ||
      stamp.pass > last.number || stamp.check != check_of(stamp))
    return false;
  std::array<std::uint64_t, kWords> words;
  std::memcpy(words.data(), page, kPageBytes);
  for (std::size_t i = kStampWords; i < kWords; ++i) {
    if (words[i] != word_of(last.file_seed, stamp.slot, i)) return false;
  }
  return true;
}

double entropy_bits(std::span<const std::byte> page) {
  std::array<std::uint32_t, 256> counts{};
  for (const std::byte value : page) ++counts[std::to_integer<std::size_t>(value)];
  double bits = 0;
  for (const std::uint32_t count : counts) {
    if (count == 0) continue;
    const double share = static_cast<double>(count) / static_cast<double>(page.size());
    bits -= share * std::log2(share);
  }
  return bits;
}

// Returns whether many words of the page repeat. Random words do not repeat within a page, but a
// pattern does, whatever the entropy of its bytes.
bool words_repeat(std::span<const std::byte> page) {
  std::array<std::uint64_t, kWords> words;
  std::memcpy(words.data(), page.data(), kPageBytes);
  std::sort(words.begin(), words.end());
  const auto distinct = std::unique(words.begin(), words.end()) - words.begin();
  return static_cast<std::size_t>(distinct) < kWords / 2;
}

}  // namespace

void make_pages(std::span<std::byte> memory, std::uint64_t file_seed, std::uint32_t first_slot) {
  ZIGGURAT_CHECK(memory.size() % kPageBytes == 0, "{} bytes are no whole pages", memory.size());
  std::array<std::uint64_t, kWords> words{};
  for (std::size_t page = 0; page < memory.size() / kPageBytes; ++page) {
    const auto slot = static_cast<std::uint32_t>(first_slot + page);
    for (std::size_t i = 0; i < kWords; ++i) words[i] = word_of(file_seed, slot, i);
    Stamp stamp{};
    stamp.slot = slot;
    std::memcpy(words.data(), &stamp, sizeof(stamp));
    std::memcpy(memory.data() + page * kPageBytes, words.data(), kPageBytes);
  }
}

void stamp_pages(std::span<std::byte> memory, const Pass& pass, std::uint64_t offset_bytes) {
  for (std::size_t at = 0; at < memory.size(); at += kPageBytes) {
    Stamp stamp;
    std::memcpy(&stamp, memory.data() + at, sizeof(stamp));
    stamp.file_seed = pass.file_seed;
    stamp.page = (offset_bytes + at) / kPageBytes;
    stamp.pass = pass.number;
    stamp.check = check_of(stamp);
    std::memcpy(memory.data() + at, &stamp, sizeof(stamp));
  }
}

std::size_t wrong_pages(std::span<const std::byte> memory, const Pass& last,
                        std::uint32_t first_number, std::uint64_t offset_bytes) {
  std::size_t wrong = 0;
  for (std::size_t at = 0; at < memory.size(); at += kPageBytes) {
    if (!page_is_right(memory.data() + at, last, first_number, (offset_bytes + at) / kPageBytes))
      ++wrong;
  }
  return wrong;
}

void SampleFacts::add(const SampleFacts& other) noexcept {
  pages += other.pages;
  constant_pages += other.constant_pages;
  thin_pages += other.thin_pages;
  wrong_pages += other.wrong_pages;
  verified = verified || other.verified;
}

SampleFacts look_at(std::span<const std::byte> memory) {
  SampleFacts facts;
  for (std::size_t at = 0; at + kPageBytes <= memory.size(); at += kPageBytes) {
    const auto page = memory.subspan(at, kPageBytes);
    ++facts.pages;
    if (std::all_of(page.begin(), page.end(), [&](std::byte b) { return b == page.front(); })) {
      ++facts.constant_pages;
    } else if (entropy_bits(page) < kThinEntropy || words_repeat(page)) {
      ++facts.thin_pages;
    }
  }
  return facts;
}

}  // namespace ziggurat::measure
