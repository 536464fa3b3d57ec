// SPDX-License-Identifier: Apache-2.0
// core/schedule/rank_channels.h: the ranks, a communicator for each thing that they
// talk about.
//
// Calls of one communicator are made in the same order by every rank; calls of two need no order
// between them. So each order below is decided by one place of the engine, from what all ranks know
// alike: the trainer's calls and the settings. What depends on timing (memory, drives, peers)
// delays a call, and never moves, adds or leaves one out.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/mesh.h"

namespace ziggurat {

struct RankChannels {
  /// Counted in data-parallel ranks, which have the same part of each layer.
  struct Groups {
    int tensor = 1;  ///< ranks that divide each layer: neighbours (Mesh)
    int shard = 0;   ///< that share a copy of the state (Sharding::of); 0: all
    int node = 0;    ///< of these, consecutive ones with a second partition of parameters; 0: none
  };
  RankChannels(Communicator& ranks, const Groups& groups) {
    const int total = ranks.world_size();
    const MeshShape shape = with_dp_of_world({.tp = groups.tensor}, total);
    const std::vector<int> data = Mesh(shape, {.ranks = total}).group(ranks.rank(), Axis::kData);
    const int size = groups.shard == 0 ? shape.dp : groups.shard;
    const SubGroups shard = in_runs_of(size, ranks.rank(), data);
    params = ranks.split(shard.inner);
    grads = ranks.split(shard.inner);
    if (size < shape.dp) replicas = ranks.split(shard.outer);
    if (groups.node > 0) node = ranks.split(in_runs_of(groups.node, ranks.rank(), data).inner);
    std::vector<int> all(static_cast<std::size_t>(total));
    std::iota(all.begin(), all.end(), 0);
    steps = ranks.split(all);
    store = ranks.split(all);
  }

  std::unique_ptr<Communicator> params;    ///< gathers: in the order of use (stage 3) or of units,
                                           ///< and in stage 0 of reduced gradients
  std::unique_ptr<Communicator> grads;     ///< reductions, in the order of finish_gradient()
  std::unique_ptr<Communicator> replicas;  ///< the same slice's ranks of all groups, in that order
  std::unique_ptr<Communicator> node;      ///< gathers within a node, in the order of use (hpZ)
  std::unique_ptr<Communicator> steps;     ///< of all: one call a step(), with its norm
  std::unique_ptr<Communicator> store;     ///< of all: the store's, at open, then one a generation
};

}  // namespace ziggurat
