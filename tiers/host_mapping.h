// SPDX-License-Identifier: Apache-2.0
// tiers/host_mapping.h: one anonymous mapping made for heavy use: large pages where they can be
// had, near one NUMA node, filled at creation so that nothing faults later, and kept out of forked
// children (which would double it by copy-on-write).
//
// What cannot be had is noted (base/log.h) and done without; only the mapping itself can fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace ziggurat {

struct HostMappingOptions {
  std::string owner;  ///< "pinned pool", "host device": for messages
  std::uint64_t size_bytes = 0;
  int numa_node = -1;      ///< -1: first touch decides
  bool huge_pages = true;  ///< transparent ones
  bool lock = false;       ///< mlock: never swapped
};

/// Move-only; unmaps.
class HostMapping {
 public:
  /// Of transparent huge pages where the machine gives them, else of 4 KiB pages; aligned to 2 MiB.
  /// Errors: kResourceExhausted if the address space or memory cannot be had.
  explicit HostMapping(const HostMappingOptions& options);
  /// Of pages that the administrator reserved (hugetlb), or nothing if too few are left. size_bytes
  /// is a multiple of 2 MiB.
  static std::optional<HostMapping> reserved(const HostMappingOptions& options);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// What it turned out to be made of: "2 MiB huge pages", "transparent huge pages", "4 KiB pages".
  const std::string& page_kind() const noexcept { return page_kind_; }

 private:
  HostMapping() = default;

  std::span<std::byte> bytes_;
  std::string page_kind_;
};

}  // namespace ziggurat
