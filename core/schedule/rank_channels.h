// SPDX-License-Identifier: Apache-2.0
// core/schedule/rank_channels.h: the data-parallel ranks, a communicator for each thing that they
// talk about.
//
// Calls of one communicator are made in the same order by every rank; calls of two need no order
// between them. So each order below is decided by one place of the engine, from what all ranks know
// alike: the trainer's calls and the settings. What depends on timing (memory, drives, peers)
// delays a call, and never moves, adds or leaves one out.
#pragma once

#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/mesh.h"
#include "core/sharding/quantization.h"

namespace ziggurat {

struct RankChannels {
  /// `group`: ranks that share a copy of the state (Sharding::of); 0: all. `node_ranks`: of these,
  /// consecutive ones that have a second partition of parameters; 0: none.
  /// `exchanges`: the nodes by which quantized exchanges go; none by default.
  RankChannels(Communicator& ranks, int group, int node_ranks, NodeGrid exchanges = {}) {
    const int total = ranks.world_size();
    const int size = group == 0 ? total : group;
    const int first = ranks.rank() / size * size;
    params = split(ranks, first, size, 1);
    grads = split(ranks, first, size, 1);
    if (size < total) replicas = split(ranks, ranks.rank() % size, total / size, size);
    if (node_ranks > 0) node = split(ranks, ranks.rank() / node_ranks * node_ranks, node_ranks, 1);
    std::vector<int> all(static_cast<std::size_t>(total));
    std::iota(all.begin(), all.end(), 0);
    quantized_params = by_node(ranks, all, exchanges);
    quantized_grads = by_node(ranks, all, exchanges);
    steps = split(ranks, 0, total, 1);
    store = split(ranks, 0, total, 1);
  }

  std::unique_ptr<Communicator> params;    ///< gathers: in the order of use (stage 3) or of units,
                                           ///< and in stage 0 of reduced gradients
  std::unique_ptr<Communicator> grads;     ///< reductions, in the order of finish_gradient()
  std::unique_ptr<Communicator> replicas;  ///< the same slice's ranks of all groups, in that order
  std::unique_ptr<Communicator> node;      ///< gathers within a node, in the order of use (hpZ)
  /// A rank's neighbours on its node, and those in its place on each node; none where that is the
  /// rank alone.
  struct ByNode {
    std::unique_ptr<Communicator> within;
    std::unique_ptr<Communicator> across;
  };
  ByNode quantized_params;  ///< of what is quantized, in place of `params`: across, then within
  ByNode quantized_grads;   ///< in place of `grads`: within, then across
  std::unique_ptr<Communicator> steps;  ///< one call a step(), with its norm
  std::unique_ptr<Communicator> store;  ///< agreements of the store: at open, then one a generation

 private:
  static ByNode by_node(Communicator& ranks, std::span<const int> members, NodeGrid grid) {
    const SubGroups groups = in_runs_of(grid.within, ranks.rank(), members);
    ByNode its;
    if (grid.within > 1) its.within = ranks.split(groups.inner);
    if (grid.nodes > 1) its.across = ranks.split(groups.outer);
    return its;
  }
  static std::unique_ptr<Communicator> split(Communicator& ranks, int first, int count,
                                             int stride) {
    std::vector<int> members(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) members[static_cast<std::size_t>(i)] = first + i * stride;
    return ranks.split(members);
  }
};

}  // namespace ziggurat
