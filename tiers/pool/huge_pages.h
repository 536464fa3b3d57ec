// SPDX-License-Identifier: Apache-2.0
// tiers/pool/huge_pages.h: how much of a range of memory the kernel holds in huge pages. Any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace ziggurat {

/// Returns how many of `bytes` are in transparent huge pages; nothing if the kernel cannot tell.
/// The range alone is looked at (ioctl PAGEMAP_SCAN, Linux 6.7), and with an older kernel all
/// memory of the process (/proc/self/smaps), which takes as long as that is large.
std::optional<std::uint64_t> huge_bytes_of(std::span<const std::byte> bytes);

namespace internal {
std::optional<std::uint64_t> scanned_huge_bytes(std::span<const std::byte> bytes);
/// Counts those of the whole mapping around the range, which the kernel may have joined with its
/// neighbours.
std::optional<std::uint64_t> listed_huge_bytes(std::span<const std::byte> bytes);
}  // namespace internal

}  // namespace ziggurat
