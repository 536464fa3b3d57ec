// SPDX-License-Identifier: Apache-2.0
// tiers/pool/host_mapping.h: one anonymous mapping for heavy use. It has large pages if the machine
// gives them, with each part on its NUMA node. It is filled at creation, so that nothing faults
// later, and it is kept out of forked children (where copy-on-write would double it).
//
// A part's pages are requested by memory policy, and checked afterwards. If the kernel refuses the
// policy, a thread on that node's CPUs fills them, which has the same effect while the node has
// room.
//
// Only the mapping itself can fail. Everything else that the machine cannot give is noted
// (base/log.h), and the mapping is used without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/absent_memory.h"
#include "base/bytes.h"
#include "tiers/pool/memory_policy.h"

namespace ziggurat {

constexpr std::uint64_t kHugePageBytes = 2 * kMiB;
constexpr std::uint64_t kSmallPageBytes = 4 * kKiB;

/// Consecutive bytes of a mapping that belong on one NUMA node.
struct NodePart {
  int numa_node = 0;
  std::uint64_t size_bytes = 0;
  std::vector<int> cpus = {};  ///< CPUs of the node that this process may use
};

struct HostMappingOptions {
  std::string owner;  ///< named in messages: "pinned pool", "host device"
  std::uint64_t size_bytes = 0;
  /// Whole pages on each node, which add up to the mapping. If empty, pages lie where they are
  /// first touched.
  std::vector<NodePart> parts = {};
  bool huge_pages = true;          ///< transparent huge pages
  bool lock = false;               ///< mlock, so that pages are never swapped
  MemoryPolicy* policy = nullptr;  ///< null means the kernel's; never called without parts
};

/// A mapping that its destructor unmaps. Move-only.
class HostMapping {
 public:
  /// Makes a mapping with transparent huge pages if the machine gives them, otherwise with pages of
  /// 4 KiB; aligned to 2 MiB. Errors: kResourceExhausted if the machine cannot give the address
  /// space or the memory.
  explicit HostMapping(const HostMappingOptions& options);
  /// Makes a mapping of pages that the administrator reserved (hugetlb); nothing if too few are
  /// left. size_bytes is a multiple of 2 MiB.
  static std::optional<HostMapping> reserved(const HostMappingOptions& options);
  /// Makes a mapping of addresses only, which `absent` keeps.
  static HostMapping without_memory(AbsentMemory& absent, std::uint64_t size_bytes);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  /// Keeps the memory mapped for ever, because a device may still write to it.
  void abandon() noexcept { bytes_ = {}; }

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// Returns the kind of pages that the mapping got: "2 MiB huge pages", "transparent huge pages",
  /// "4 KiB pages".
  const std::string& page_kind() const noexcept { return page_kind_; }
  /// Describes the parts: "4.0 GiB on NUMA node 0, 4.0 GiB on NUMA node 1", with a remark if that
  /// is not certain; empty without parts.
  const std::string& placement() const noexcept { return placement_; }

 private:
  HostMapping() = default;
  int fill(const HostMappingOptions& options);

  std::span<std::byte> bytes_;
  bool is_mapped_ = true;  // by this class
  std::string page_kind_;
  std::string placement_;
};

}  // namespace ziggurat
