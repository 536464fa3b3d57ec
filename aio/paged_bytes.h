// SPDX-License-Identifier: Apache-2.0
// aio/paged_bytes.h: the bytes of a simulated file. Copies share pages until one of them writes, so
// that thousands of seeds may begin at the same disk. What repeats one word of eight bytes over and
// over takes the memory of that word, so that a file may be larger than the machine. One thread
// only, all copies together.
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
  /// What is new reads as zeros.
  void resize(std::uint64_t size_bytes);
  /// Both within size().
  void write(std::uint64_t offset_bytes, std::span<const std::byte> bytes);
  void read(std::uint64_t offset_bytes, std::span<std::byte> bytes) const;
  std::vector<std::byte> all() const;
  bool operator==(const PagedBytes& other) const;
  /// That it takes, as if no copy shared it.
  std::uint64_t memory_bytes() const;

 private:
  static constexpr std::uint64_t kPageBytes = 64 * 1024;
  using Bytes = std::array<std::byte, kPageBytes>;
  struct Run {
    std::uint64_t word;
    std::uint64_t end_bytes;  // in the page
  };
  struct Mixed {
    std::vector<Run> runs;         // few of them, or
    std::unique_ptr<Bytes> bytes;  // all
  };
  /// Past the size a page is zeros too.
  struct Page {
    std::uint64_t word = 0;              // over and over, unless it is
    std::shared_ptr<const Mixed> mixed;  // shared with copies
  };

  static void expand(const Page& page, std::span<std::byte> bytes);
  static Page compress(std::span<const std::byte> bytes);
  static void read_page(const Page& page, std::uint64_t at, std::span<std::byte> bytes);

  std::uint64_t size_bytes_ = 0;
  std::vector<Page> pages_;
};

}  // namespace ziggurat
