// SPDX-License-Identifier: Apache-2.0
// tiers/pool/memory_policy.cc: calls mbind and get_mempolicy.
//
// It uses MPOL_PREFERRED, and the caller checks the result afterwards: under MPOL_BIND a node that
// turns out too small would mean the OOM killer instead of an error.
#include "tiers/pool/memory_policy.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>

namespace ziggurat {
namespace {

class KernelPolicy final : public MemoryPolicy {
 public:
  int prefer(std::span<std::byte> bytes, int numa_node) override {
    if (::numa_available() < 0) return ENOSYS;
    struct bitmask* nodes = ::numa_allocate_nodemask();
    const auto node = static_cast<unsigned>(numa_node);
    int error = EINVAL;  // an empty mask would mean "where it is first touched", and succeed
    if (node < nodes->size) {
      ::numa_bitmask_setbit(nodes, node);
      error =
          ::mbind(bytes.data(), bytes.size(), MPOL_PREFERRED, nodes->maskp, nodes->size + 1, 0) == 0
              ? 0
              : errno;
    }
    ::numa_free_nodemask(nodes);
    return error;
  }

  int node_of(const std::byte* address) override {
    int node = -1;
    if (::get_mempolicy(&node, nullptr, 0, const_cast<std::byte*>(address),
                        MPOL_F_NODE | MPOL_F_ADDR) != 0)
      return -errno;
    return node;
  }
};

}  // namespace

MemoryPolicy& MemoryPolicy::of_kernel() {
  static KernelPolicy policy;  // has no state
  return policy;
}

}  // namespace ziggurat
