// SPDX-License-Identifier: Apache-2.0
// aio/paged_bytes.h: the bytes of a simulated file. Copies share pages until one of them writes, so
// that thousands of seeds can begin with the same disk. A page that repeats one word of eight bytes
// is stored as that word, and where nothing was written no page is stored, so that a file may be
// larger than the machine's memory. For one thread only, including all copies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace ziggurat {

class PagedBytes {
 public:
  std::uint64_t size() const noexcept { return size_bytes_; }
  /// Changes the size. New bytes read as zeros.
  void resize(std::uint64_t size_bytes);
  /// The range must lie within size().
  void write(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
  void read(std::uint64_t offset_bytes, std::span<std::byte> bytes) const;
  std::vector<std::byte> all() const;
  bool operator==(const PagedBytes& other) const;
  /// Returns the memory that these bytes take, counted as if no copy shared it.
  std::uint64_t memory_bytes() const;

 private:
  static constexpr std::uint64_t kPageBytes = 64 * 1024;
  using Bytes = std::array<std::byte, kPageBytes>;
  struct Run {
    std::uint64_t word;
    std::uint64_t end_bytes;  // in the page
  };
  struct Mixed {
    std::vector<Run> runs;         // if there are few runs; otherwise
    std::unique_ptr<Bytes> bytes;  // all the bytes
  };
  /// One page. In the last page the bytes past the file's size are zeros.
  struct Page {
    std::uint64_t word = 0;              // repeated over the whole page, unless
    std::shared_ptr<const Mixed> mixed;  // `mixed` is set; it is shared with copies
  };

  static constexpr std::uint64_t kBlockPages = 256;
  using Block = std::array<Page, kBlockPages>;

  static void expand(const Page& page, std::span<std::byte> bytes);
  static Page compress(std::span<const std::byte> bytes);
  static bool is_zeros(const Page& page) noexcept { return page.word == 0 && !page.mixed; }
  static bool same(const Page& a, const Page& b);
  static void read_page(const Page& page, std::uint64_t at, std::span<std::byte> bytes);
  const Page& page(std::uint64_t index) const noexcept;
  void set_page(std::uint64_t index, Page page);

  std::uint64_t size_bytes_ = 0;
  /// Null for pages of zeros. Shared with copies until one of them writes.
  std::vector<std::shared_ptr<Block>> blocks_;
};

}  // namespace ziggurat
