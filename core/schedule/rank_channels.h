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
#include <span>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/mesh.h"
#include "core/sharding/quantization.h"

namespace ziggurat {

struct RankChannels {
  /// Counted in data-parallel ranks, which have the same part of each layer.
  struct Groups {
    int shard = 0;  ///< that share a copy of the state (Sharding::of); 0: all
    int node = 0;   ///< of these, consecutive ones with a second partition of parameters; 0: none
    NodeGrid exchanges{};  ///< the nodes by which quantized exchanges go
  };
  RankChannels(Communicator& ranks, const Place& place, const Groups& groups) {
    const std::vector<int>& data = place.data_group;
    const int size = groups.shard == 0 ? place.data_ranks() : groups.shard;
    const SubGroups shard = in_runs_of(size, place.rank, data);
    params = ranks.split(shard.inner);
    grads = ranks.split(shard.inner);
    if (size < place.data_ranks()) replicas = ranks.split(shard.outer);
    if (groups.node > 0) node = ranks.split(in_runs_of(groups.node, place.rank, data).inner);
    quantized_params = by_node(ranks, data, groups.exchanges);
    quantized_grads = by_node(ranks, data, groups.exchanges);
    std::vector<int> all(static_cast<std::size_t>(ranks.world_size()));
    std::iota(all.begin(), all.end(), 0);
    // The first call of an engine is its store's: two ranks that open something else are found out.
    store = ranks.split(all);
    steps = ranks.split(all);
    saves = ranks.split(all);
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
  std::unique_ptr<Communicator> steps;  ///< of all: one call a step(), with its norm
  std::unique_ptr<Communicator> saves;  ///< of all: a save's begin and end, one save at a time
  std::unique_ptr<Communicator> store;  ///< of all: the store's, at open, then one a generation

 private:
  static ByNode by_node(Communicator& ranks, std::span<const int> members, NodeGrid grid) {
    const SubGroups groups = in_runs_of(grid.within, ranks.rank(), members);
    ByNode its;
    if (grid.within > 1) its.within = ranks.split(groups.inner);
    if (grid.nodes > 1) its.across = ranks.split(groups.outer);
    return its;
  }
};

}  // namespace ziggurat
