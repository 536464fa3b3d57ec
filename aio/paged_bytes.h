// SPDX-License-Identifier: Apache-2.0
// aio/paged_bytes.h: the bytes of a simulated file. Copies share pages until one of them writes, so
// that thousands of seeds may begin at the same disk. One thread only, all copies together.
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

 private:
  static constexpr std::uint64_t kPageBytes = 64 * 1024;
  using Page = std::array<std::byte, kPageBytes>;

  Page& own_page(std::uint64_t index);

  std::uint64_t size_bytes_ = 0;
  std::vector<std::shared_ptr<Page>> pages_;  ///< null: zeros. Past the size a page is zeros too.
};

}  // namespace ziggurat
