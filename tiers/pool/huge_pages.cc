// SPDX-License-Identifier: Apache-2.0
// tiers/pool/huge_pages.cc: asks the kernel which pages of a range are huge, and reads its lists
// where it cannot be asked.
#include "tiers/pool/huge_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/bytes.h"

namespace ziggurat {
namespace {

// <linux/fs.h> of Linux 6.7; older headers lack it.
struct PageRegion {
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t categories;
};
struct PageScan {
  std::uint64_t size;
  std::uint64_t flags;
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t walk_end;
  std::uint64_t regions;
  std::uint64_t region_count;
  std::uint64_t max_pages;
  std::uint64_t category_inverted;
  std::uint64_t category_mask;
  std::uint64_t category_anyof_mask;
  std::uint64_t return_mask;
};
constexpr unsigned long kPageScan = _IOWR('f', 16, PageScan);
constexpr std::uint64_t kPageIsHuge = std::uint64_t{1} << 6;

std::uint64_t address_of(const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); }

}  // namespace

namespace internal {

std::optional<std::uint64_t> scanned_huge_bytes(std::span<const std::byte> bytes) {
  const int pages = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pages < 0) return std::nullopt;
  std::array<PageRegion, 64> regions{};
  PageScan scan{};
  scan.size = sizeof(scan);
  scan.start = address_of(bytes.data());
  scan.end = scan.start + round_up(bytes.size(), 4 * kKiB);
  scan.regions = reinterpret_cast<std::uintptr_t>(regions.data());
  scan.region_count = regions.size();
  scan.category_mask = scan.return_mask = kPageIsHuge;
  std::optional<std::uint64_t> found = 0;
  while (found && scan.start < scan.end) {
    const int count = ::ioctl(pages, kPageScan, &scan);
    if (count < 0 || scan.walk_end <= scan.start) {
      found.reset();
      break;
    }
    for (int i = 0; i < count; ++i) {
      const PageRegion& region = regions[static_cast<std::size_t>(i)];
      *found += region.end - region.start;
    }
    scan.start = scan.walk_end;
  }
  ::close(pages);
  return found;
}

std::optional<std::uint64_t> listed_huge_bytes(std::span<const std::byte> bytes) {
  std::ifstream smaps("/proc/self/smaps");
  const std::uint64_t address = address_of(bytes.data());
  bool ours = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      ours = begin <= address && address < end;
    } else if (ours && std::sscanf(line.c_str(), "AnonHugePages: %llu kB", &kib) == 1) {
      return kib * kKiB;
    }
  }
  return std::nullopt;
}

}  // namespace internal

std::optional<std::uint64_t> huge_bytes_of(std::span<const std::byte> bytes) {
  const std::optional<std::uint64_t> scanned = internal::scanned_huge_bytes(bytes);
  return scanned ? scanned : internal::listed_huge_bytes(bytes);
}

}  // namespace ziggurat
