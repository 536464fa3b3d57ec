// SPDX-License-Identifier: Apache-2.0
// aio/paged_bytes.cc: bytes in pages.
#include "aio/paged_bytes.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

/// Calls piece(page, offset in it, offset in the range, bytes) for each page of the range.
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

PagedBytes::Page& PagedBytes::own_page(std::uint64_t index) {
  std::shared_ptr<Page>& page = pages_[index];
  if (!page) {
    page = std::make_shared<Page>();
  } else if (page.use_count() > 1) {
    page = std::make_shared<Page>(*page);
  }
  return *page;
}

void PagedBytes::resize(std::uint64_t size_bytes) {
  pages_.resize(round_up(size_bytes, kPageBytes) / kPageBytes);
  const std::uint64_t tail = size_bytes % kPageBytes;
  if (size_bytes < size_bytes_ && tail != 0 && pages_.back()) {
    Page& last = own_page(pages_.size() - 1);
    std::fill(last.begin() + static_cast<std::ptrdiff_t>(tail), last.end(), std::byte{0});
  }
  size_bytes_ = size_bytes;
}

void PagedBytes::write(std::uint64_t offset_bytes, std::span<const std::byte> bytes) {
  ZIGGURAT_CHECK(offset_bytes <= size_bytes_ && bytes.size() <= size_bytes_ - offset_bytes,
                 "{} bytes at {} of {}", bytes.size(), offset_bytes, size_bytes_);
  for_each_piece(
      kPageBytes, offset_bytes, bytes.size(),
      [&](std::uint64_t page, std::uint64_t at, std::uint64_t done, std::uint64_t count) {
        std::memcpy(own_page(page).data() + at, bytes.data() + done, count);
      });
}

void PagedBytes::read(std::uint64_t offset_bytes, std::span<std::byte> bytes) const {
  ZIGGURAT_CHECK(offset_bytes <= size_bytes_ && bytes.size() <= size_bytes_ - offset_bytes,
                 "{} bytes at {} of {}", bytes.size(), offset_bytes, size_bytes_);
  for_each_piece(
      kPageBytes, offset_bytes, bytes.size(),
      [&](std::uint64_t page, std::uint64_t at, std::uint64_t done, std::uint64_t count) {
        if (pages_[page]) {
          std::memcpy(bytes.data() + done, pages_[page]->data() + at, count);
        } else {
          std::memset(bytes.data() + done, 0, count);
        }
      });
}

std::vector<std::byte> PagedBytes::all() const {
  std::vector<std::byte> bytes(size_bytes_);
  read(0, bytes);
  return bytes;
}

bool PagedBytes::operator==(const PagedBytes& other) const {
  static constexpr Page kZeros{};
  return size_bytes_ == other.size_bytes_ &&
         std::ranges::equal(pages_, other.pages_, [](const auto& a, const auto& b) {
           return a == b || (a ? *a : kZeros) == (b ? *b : kZeros);
         });
}

}  // namespace ziggurat
