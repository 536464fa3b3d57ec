// SPDX-License-Identifier: Apache-2.0
// tiers/host_mapping.h: one anonymous mapping made for heavy use: large pages where they can be
// had, each part on the NUMA node it is for, filled at creation so that nothing faults later, and
// kept out of forked children (which would double it by copy-on-write).
//
// A part's pages are asked for by memory policy, and looked at afterwards. Where the kernel refuses
// the policy, they are filled by a thread on that node's CPUs, which has the same effect while the
// node has room.
//
// What cannot be had is noted (base/log.h) and done without; only the mapping itself can fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tiers/memory_policy.h"

namespace ziggurat {

/// Consecutive bytes of a mapping, for one NUMA node.
struct NodePart {
  int numa_node = 0;
  std::uint64_t size_bytes = 0;
  std::vector<int> cpus = {};  ///< of the node: those this process may use
};

struct HostMappingOptions {
  std::string owner;  ///< "pinned pool", "host device": for messages
  std::uint64_t size_bytes = 0;
  /// Whole pages on each node, the mapping in all; none: first touch decides.
  std::vector<NodePart> parts = {};
  bool huge_pages = true;          ///< transparent ones
  bool lock = false;               ///< mlock: never swapped
  MemoryPolicy* policy = nullptr;  ///< null: the kernel's; never called without parts
};

/// Move-only; unmaps.
class HostMapping {
 public:
  /// Takes transparent huge pages where the machine gives them, else 4 KiB ones; aligned to 2 MiB.
  /// Errors: kResourceExhausted if the address space or memory cannot be had.
  explicit HostMapping(const HostMappingOptions& options);
  /// Takes pages that the administrator reserved (hugetlb); none if too few are left. size_bytes
  /// is a multiple of 2 MiB.
  static std::optional<HostMapping> reserved(const HostMappingOptions& options);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  /// Never unmaps: somebody may write to the memory for ever.
  void abandon() noexcept { bytes_ = {}; }

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// What it turned out to be made of: "2 MiB huge pages", "transparent huge pages", "4 KiB pages".
  const std::string& page_kind() const noexcept { return page_kind_; }
  /// "4.0 GiB on NUMA node 0, 4.0 GiB on NUMA node 1", and what came of it where that is not sure;
  /// empty without parts.
  const std::string& placement() const noexcept { return placement_; }

 private:
  HostMapping() = default;
  int fill(const HostMappingOptions& options);

  std::span<std::byte> bytes_;
  std::string page_kind_;
  std::string placement_;
};

}  // namespace ziggurat
