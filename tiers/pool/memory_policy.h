// SPDX-License-Identifier: Apache-2.0
// tiers/pool/memory_policy.h: the kernel's calls about the NUMA node of pages, as an interface that
// tests can replace by one that records calls.
#pragma once

#include <cstddef>
#include <span>

namespace ziggurat {

class MemoryPolicy {
 public:
  virtual ~MemoryPolicy() = default;
  /// Asks for pages of `bytes` (whole pages, none touched yet) on `numa_node`, or on another node
  /// if that one is full. Returns 0, or the errno of a refusal: EPERM in most containers, ENOSYS in
  /// a kernel without NUMA, EINVAL for a node that this machine lacks.
  virtual int prefer(std::span<std::byte> bytes, int numa_node) = 0;
  /// Returns the node of the page at `address`, which must have been touched; or -errno.
  virtual int node_of(const std::byte* address) = 0;

  static MemoryPolicy& of_kernel();
};

}  // namespace ziggurat
