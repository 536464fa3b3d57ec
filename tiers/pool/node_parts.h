// SPDX-License-Identifier: Apache-2.0
// tiers/pool/node_parts.h: which bytes of one mapping lie on which NUMA node, and how to allocate
// near a node.
//
// Every second part is filled from its end. So the free bytes of two neighbouring parts lie
// together, and a long range fits across their border as if there were none.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tiers/pool/arena.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {

/// A NUMA node on which memory should lie.
struct PoolNode {
  int numa_node = 0;
  std::uint64_t weight = 1;    ///< weight of its share of the bytes, in any unit
  std::vector<int> cpus = {};  ///< CPUs of the node that this process may use
};

/// Divides `size_bytes` by weight, cut between pages; the last part ends the mapping. If there are
/// few bytes, some nodes get none.
std::vector<NodePart> parts_by_weight(std::uint64_t size_bytes, std::uint64_t page_bytes,
                                      std::span<const PoolNode> nodes);

class NodeParts {
 public:
  explicit NodeParts(std::span<const NodePart> parts);

  /// Allocates a free range of `arena`, which manages the mapping from `base_offset_bytes` on: in
  /// the part of `numa_node` (-1 for any) if that has room, otherwise anywhere.
  std::optional<std::uint64_t> allocate(Arena& arena, std::uint64_t base_offset_bytes,
                                        std::uint64_t size_bytes, int numa_node) const;
  /// Returns whether all of a range of the mapping lies in the part of `numa_node`.
  bool on_node(int numa_node, FreeRange range) const noexcept;
  bool empty() const noexcept { return parts_.empty(); }

 private:
  struct Part {
    int numa_node;
    FreeRange range;
    Arena::Side side;  // side from which the part is filled
  };
  const Part* find(int numa_node) const noexcept;

  std::vector<Part> parts_;  // in order of address
};

}  // namespace ziggurat
