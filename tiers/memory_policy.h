// SPDX-License-Identifier: Apache-2.0
// tiers/memory_policy.h: the kernel's calls about the NUMA node of pages, as an interface: tests
// put a recording one in its place.
#pragma once

#include <cstddef>
#include <span>

namespace ziggurat {

class MemoryPolicy {
 public:
  virtual ~MemoryPolicy() = default;
  /// Pages of `bytes` (whole pages, none touched yet) shall lie on `numa_node`, or on another one
  /// where that is full. 0, or the errno of a refusal: EPERM in most containers, ENOSYS in a kernel
  /// without NUMA, EINVAL for a node that this machine lacks.
  virtual int prefer(std::span<std::byte> bytes, int numa_node) = 0;
  /// Where the page at `address`, which was touched, lies; or -errno.
  virtual int node_of(const std::byte* address) = 0;

  static MemoryPolicy& of_kernel();
};

}  // namespace ziggurat
