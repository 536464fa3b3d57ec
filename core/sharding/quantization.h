// SPDX-License-Identifier: Apache-2.0
// core/sharding/quantization.h: what ranks send each other in 8 or 4 bits (Wang et al. 2023,
// "ZeRO++"), when that is possible, and how the exchange is grouped. Arithmetic only.
//
// qwZ (section 4.1) gathers a unit's slices in int8. qgZ (section 4.3) reduces the unit's gradient
// in 8 or 4 bits, first among the ranks of each node, then among nodes. Both exchange node by node,
// so that what must leave a node leaves it once.
#pragma once

#include <cstdint>
#include <string>

#include "core/sharding/strategy.h"

namespace ziggurat {

struct Quantization {
  bool weights = false;    ///< qwZ: int8
  int gradient_bits = 16;  ///< qgZ: 8 or 4; 16 for no quantization

  bool gradients() const noexcept { return gradient_bits != 16; }
  bool any() const noexcept { return weights || gradients(); }
  friend bool operator==(const Quantization&, const Quantization&) = default;
};

/// Number of buffers for units whose int8 slices are under way: one is between the ranks, one is
/// being filled or read.
inline constexpr std::uint64_t kQuantizedGathers = 2;

/// Refuses what cannot be quantized. Errors: kInvalidArgument, naming the settings, for bits other
/// than 4, 8 or 16, for anything but stage 3 over several ranks without groups, and for ranks that
/// do not fill whole nodes of `dp_ranks_per_node`.
void require_quantizable(const Quantization& quantization, const Strategy& strategy,
                         int dp_ranks_per_node);

/// How quantized exchanges are grouped: first among `within` ranks of a node, then among one rank
/// of each of `nodes` nodes.
struct NodeGrid {
  int within = 1;
  int nodes = 1;
};
constexpr NodeGrid node_grid(int ranks, int ranks_per_node) noexcept {
  const int within = ranks < ranks_per_node ? ranks : ranks_per_node;
  return {.within = within, .nodes = ranks / within};
}

}  // namespace ziggurat
