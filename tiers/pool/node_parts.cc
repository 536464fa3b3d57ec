// SPDX-License-Identifier: Apache-2.0
// tiers/pool/node_parts.cc: computes shares by weight, and allocates within one node's part of an
// arena.
#include "tiers/pool/node_parts.h"

#include <algorithm>

#include "base/bytes.h"

namespace ziggurat {

std::vector<NodePart> parts_by_weight(std::uint64_t size_bytes, std::uint64_t page_bytes,
                                      std::span<const PoolNode> nodes) {
  std::vector<NodePart> parts;
  double all = 0;
  for (const PoolNode& node : nodes) all += static_cast<double>(node.weight);
  double so_far = 0;
  std::uint64_t begin = 0;
  for (const PoolNode& node : nodes) {
    so_far += static_cast<double>(node.weight);
    const bool last = &node == &nodes.back();
    const double share = static_cast<double>(size_bytes) * (so_far / all);
    const std::uint64_t end = last ? round_up(size_bytes, 4 * kKiB)
                                   : static_cast<std::uint64_t>(share) / page_bytes * page_bytes;
    if (end > begin)
      parts.push_back({.numa_node = node.numa_node, .size_bytes = end - begin, .cpus = node.cpus});
    begin = std::max(begin, end);
  }
  return parts;
}

NodeParts::NodeParts(std::span<const NodePart> parts) {
  std::uint64_t begin = 0;
  for (const NodePart& part : parts) {
    const bool even = parts_.size() % 2 == 0;
    parts_.push_back({.numa_node = part.numa_node,
                      .range = {begin, part.size_bytes},
                      .side = even ? Arena::Side::kLowest : Arena::Side::kHighest});
    begin += part.size_bytes;
  }
}

const NodeParts::Part* NodeParts::find(int numa_node) const noexcept {
  const auto part = std::ranges::find(parts_, numa_node, &Part::numa_node);
  return part == parts_.end() ? nullptr : &*part;
}

std::optional<std::uint64_t> NodeParts::allocate(Arena& arena, std::uint64_t base_offset_bytes,
                                                 std::uint64_t size_bytes, int numa_node) const {
  const Part* part = numa_node < 0 || parts_.size() < 2 ? nullptr : find(numa_node);
  if (part != nullptr) {
    const std::uint64_t begin = std::max(part->range.offset_bytes, base_offset_bytes);
    const std::uint64_t end = std::min(part->range.end(), base_offset_bytes + arena.size_bytes());
    if (begin + size_bytes <= end) {
      const FreeRange within{begin - base_offset_bytes, end - begin};
      if (const auto near = arena.allocate_within(size_bytes, within, part->side)) return near;
    }
  }
  return arena.allocate(size_bytes);
}

bool NodeParts::on_node(int numa_node, FreeRange range) const noexcept {
  const Part* part = find(numa_node);
  return part != nullptr && range.offset_bytes >= part->range.offset_bytes &&
         range.end() <= part->range.end();
}

}  // namespace ziggurat
