// SPDX-License-Identifier: Apache-2.0
// core/sharding/quantization.h: what ranks send each other in 8 or 4 bits (Wang et al. 2023,
// "ZeRO++"), where that can be, and by which way it goes. Arithmetic only.
//
// qwZ (section 4.1): a unit's slices are gathered in int8. qgZ (section 4.3): its gradient is
// reduced in 8 or 4 bits, the sums of each node's ranks first, then those of the nodes. Both go
// node by node, so that what must leave a node leaves it once.
#pragma once

#include <cstdint>
#include <string>

#include "core/sharding/strategy.h"

namespace ziggurat {

struct Quantization {
  bool weights = false;    ///< qwZ: int8
  int gradient_bits = 16;  ///< qgZ: 8 or 4; 16: as they are

  bool gradients() const noexcept { return gradient_bits != 16; }
  bool any() const noexcept { return weights || gradients(); }
  friend bool operator==(const Quantization&, const Quantization&) = default;
};

/// Buffers for units whose int8 slices are under way: one between the ranks, one being made or
/// taken in.
inline constexpr std::uint64_t kQuantizedGathers = 2;

/// Errors: kInvalidArgument, naming the flags, for other bits than 4, 8 or 16, for anything but
/// stage 3 over several ranks without groups, and unless these are whole nodes of
/// `dp_ranks_per_node`.
void require_quantizable(const Quantization& quantization, const Strategy& strategy,
                         int dp_ranks_per_node);

/// Ranks by whom a quantized exchange goes: `within` of a node, then one of each of `nodes`.
struct NodeGrid {
  int within = 1;
  int nodes = 1;
};
constexpr NodeGrid node_grid(int ranks, int ranks_per_node) noexcept {
  const int within = ranks < ranks_per_node ? ranks : ranks_per_node;
  return {.within = within, .nodes = ranks / within};
}

}  // namespace ziggurat
