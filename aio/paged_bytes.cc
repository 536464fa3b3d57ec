// SPDX-License-Identifier: Apache-2.0
// aio/paged_bytes.cc: stores each page as one repeated word, as a few runs of words, or as bytes.
#include "aio/paged_bytes.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kWordBytes = sizeof(std::uint64_t);

std::uint64_t word_at(std::span<const std::byte> bytes, std::uint64_t at) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes.data() + at, kWordBytes);
  return word;
}

void repeat(std::uint64_t word, std::span<std::byte> bytes) {
  for (std::uint64_t at = 0; at < bytes.size(); at += kWordBytes)
    std::memcpy(bytes.data() + at, &word, kWordBytes);
}

/// Returns where the run of the word at `begin` ends. For pages of one word a memcmp is faster than
/// a loop over the words.
std::uint64_t end_of_run(std::span<const std::byte> bytes, std::uint64_t begin) {
  const std::byte* const from = bytes.data() + begin;
  const std::uint64_t size = bytes.size() - begin;
  if (std::memcmp(from, from + kWordBytes, size - kWordBytes) == 0) return bytes.size();
  std::uint64_t at = begin + kWordBytes;
  while (word_at(bytes, at) == word_at(bytes, begin)) at += kWordBytes;
  return at;
}

/// Calls piece(page, offset in the page, offset in the range, bytes) for each page of the range.
template <typename Piece>
void for_each_piece(std::uint64_t page_bytes, std::uint64_t offset_bytes, std::uint64_t size_bytes,
                    const Piece& piece) {
  for (std::uint64_t done = 0; done < size_bytes;) {
    const std::uint64_t at = offset_bytes + done;
    const std::uint64_t count = std::min(size_bytes - done, page_bytes - at % page_bytes);
    piece(at / page_bytes, at % page_bytes, done, count);
    done += count;
  }
}

}  // namespace

void PagedBytes::expand(const Page& page, std::span<std::byte> bytes) {
  if (!page.mixed) return repeat(page.word, bytes);
  if (page.mixed->bytes) {
    copy_bytes(*page.mixed->bytes, bytes);
    return;
  }
  std::uint64_t begin = 0;
  for (const Run& run : page.mixed->runs) {
    repeat(run.word, bytes.subspan(begin, run.end_bytes - begin));
    begin = run.end_bytes;
  }
}

PagedBytes::Page PagedBytes::compress(std::span<const std::byte> bytes) {
  constexpr std::size_t kRunsMax = 16;
  std::vector<Run> runs;
  for (std::uint64_t begin = 0; begin < bytes.size() && runs.size() <= kRunsMax;) {
    const std::uint64_t end = end_of_run(bytes, begin);
    runs.push_back({.word = word_at(bytes, begin), .end_bytes = end});
    begin = end;
  }
  if (runs.size() == 1) return {.word = runs.front().word, .mixed = nullptr};
  auto mixed = std::make_shared<Mixed>();
  if (runs.size() <= kRunsMax) {
    mixed->runs = std::move(runs);
  } else {
    mixed->bytes = std::make_unique<Bytes>();
    std::memcpy(mixed->bytes->data(), bytes.data(), bytes.size());
  }
  return {.word = 0, .mixed = std::move(mixed)};
}

const PagedBytes::Page& PagedBytes::page(std::uint64_t index) const noexcept {
  static const Page zeros;
  const std::shared_ptr<Block>& block = blocks_[index / kBlockPages];
  return block ? (*block)[index % kBlockPages] : zeros;
}

void PagedBytes::set_page(std::uint64_t index, Page page) {
  std::shared_ptr<Block>& block = blocks_[index / kBlockPages];
  if (!block) {
    if (is_zeros(page)) return;
    block = std::make_shared<Block>();
  } else if (block.use_count() > 1) {
    block = std::make_shared<Block>(*block);
  }
  (*block)[index % kBlockPages] = std::move(page);
}

void PagedBytes::resize(std::uint64_t size_bytes) {
  const std::uint64_t pages = round_up(size_bytes, kPageBytes) / kPageBytes;
  const std::uint64_t before = round_up(size_bytes_, kPageBytes) / kPageBytes;
  // Pages of the last block that are cut off, which must read as zeros if the file grows again.
  const std::uint64_t last = std::min(before, round_up(pages, kBlockPages));
  for (std::uint64_t index = pages; index < last; ++index) set_page(index, {});
  blocks_.resize(round_up(pages, kBlockPages) / kBlockPages);
  const std::uint64_t tail = size_bytes % kPageBytes;
  if (size_bytes < size_bytes_ && tail != 0) {
    Bytes bytes;
    expand(page(pages - 1), bytes);
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(tail), bytes.end(), std::byte{0});
    set_page(pages - 1, compress(bytes));
  }
  size_bytes_ = size_bytes;
}

void PagedBytes::write(std::uint64_t offset_bytes, std::span<const std::byte> bytes) {
  ZIGGURAT_CHECK(offset_bytes <= size_bytes_ && bytes.size() <= size_bytes_ - offset_bytes,
                 "{} bytes at {} of {}", bytes.size(), offset_bytes, size_bytes_);
  for_each_piece(
      kPageBytes, offset_bytes, bytes.size(),
      [&](std::uint64_t index, std::uint64_t at, std::uint64_t done, std::uint64_t count) {
        if (count == kPageBytes) {
          set_page(index, compress(bytes.subspan(done, count)));
          return;
        }
        Bytes whole;
        expand(page(index), whole);
        std::memcpy(whole.data() + at, bytes.data() + done, count);
        set_page(index, compress(whole));
      });
}

void PagedBytes::read_page(const Page& page, std::uint64_t at, std::span<std::byte> bytes) {
  if (page.mixed && page.mixed->bytes) {
    std::memcpy(bytes.data(), page.mixed->bytes->data() + at, bytes.size());
    return;
  }
  if (bytes.size() == kPageBytes) return expand(page, bytes);
  Bytes whole;
  expand(page, whole);
  std::memcpy(bytes.data(), whole.data() + at, bytes.size());
}

void PagedBytes::read(std::uint64_t offset_bytes, std::span<std::byte> bytes) const {
  ZIGGURAT_CHECK(offset_bytes <= size_bytes_ && bytes.size() <= size_bytes_ - offset_bytes,
                 "{} bytes at {} of {}", bytes.size(), offset_bytes, size_bytes_);
  for_each_piece(
      kPageBytes, offset_bytes, bytes.size(),
      [&](std::uint64_t index, std::uint64_t at, std::uint64_t done, std::uint64_t count) {
        read_page(page(index), at, bytes.subspan(done, count));
      });
}

std::vector<std::byte> PagedBytes::all() const {
  std::vector<std::byte> bytes(size_bytes_);
  read(0, bytes);
  return bytes;
}

bool PagedBytes::same(const Page& a, const Page& b) {
  if (a.mixed == b.mixed) return a.mixed != nullptr || a.word == b.word;
  // Equal bytes are always stored in the same form, so different forms mean different bytes.
  if (!a.mixed || !b.mixed || (a.mixed->bytes == nullptr) != (b.mixed->bytes == nullptr))
    return false;
  if (a.mixed->bytes) return *a.mixed->bytes == *b.mixed->bytes;
  return std::ranges::equal(a.mixed->runs, b.mixed->runs, [](const Run& one, const Run& two) {
    return one.word == two.word && one.end_bytes == two.end_bytes;
  });
}

bool PagedBytes::operator==(const PagedBytes& other) const {
  if (size_bytes_ != other.size_bytes_) return false;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i] == other.blocks_[i]) continue;
    for (std::uint64_t at = 0; at < kBlockPages; ++at) {
      const std::uint64_t index = i * kBlockPages + at;
      if (!same(page(index), other.page(index))) return false;
    }
  }
  return true;
}

std::uint64_t PagedBytes::memory_bytes() const {
  std::uint64_t bytes = blocks_.size() * sizeof(blocks_[0]);
  for (const auto& block : blocks_) {
    if (!block) continue;
    bytes += sizeof(Block);
    for (const Page& page : *block) {
      if (!page.mixed) continue;
      bytes += sizeof(Mixed) + page.mixed->runs.size() * sizeof(Run);
      if (page.mixed->bytes) bytes += kPageBytes;
    }
  }
  return bytes;
}

}  // namespace ziggurat
