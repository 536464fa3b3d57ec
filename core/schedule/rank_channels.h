// SPDX-License-Identifier: Apache-2.0
// core/schedule/rank_channels.h: a communicator among the ranks for each kind of exchange.
//
// All ranks make the calls of one communicator in the same order; calls of two communicators need
// no order between them. So the order of each communicator's calls is decided in one place of the
// engine, from what all ranks know alike: the trainer's calls and the settings. Timing (memory,
// drives, other ranks) may delay a call, but never moves, adds or omits one.
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
  /// The sizes of groups, counted in data-parallel ranks: those that have the same part of each
  /// layer.
  struct Groups {
    int shard = 0;  ///< ranks that share one copy of the state (Sharding::of); 0 if all do
    /// Consecutive ranks among those that have a second cut of parameters; 0 if there is none.
    int node = 0;
    /// How quantized exchanges are grouped: within a node, and between nodes.
    NodeGrid exchanges{};
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
    // The first call of an engine is one of its store. So ranks that open different things are
    // found out by that call.
    store = ranks.split(all);
    steps = ranks.split(all);
    saves = ranks.split(all);
  }

  /// Gathers of parameters, in the order of use (stage 3) or of units; in stage 0, of reduced
  /// gradients.
  std::unique_ptr<Communicator> params;
  /// Reductions of gradients, in the order of finish_gradient().
  std::unique_ptr<Communicator> grads;
  /// Reductions among the ranks of all groups that hold the same slice, in the same order as
  /// `grads`.
  std::unique_ptr<Communicator> replicas;
  std::unique_ptr<Communicator> node;  ///< gathers within a node, in the order of use (hpZ)
  /// A communicator with the other ranks of this node, and one with the ranks in the same place on
  /// each node. Null if the group has only this rank.
  struct ByNode {
    std::unique_ptr<Communicator> within;
    std::unique_ptr<Communicator> across;
  };
  /// Quantized parameters, instead of `params`: first across, then within.
  ByNode quantized_params;
  ByNode quantized_grads;  ///< quantized gradients, instead of `grads`: first within, then across
  /// All ranks: one call in each step(), with the step's norm.
  std::unique_ptr<Communicator> steps;
  /// All ranks: the begin and the end of a save, one save at a time.
  std::unique_ptr<Communicator> saves;
  /// All ranks: the store's calls at open, then one for each generation.
  std::unique_ptr<Communicator> store;

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
