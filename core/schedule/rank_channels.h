// SPDX-License-Identifier: Apache-2.0
// core/schedule/rank_channels.h: the data-parallel ranks, a communicator for each thing that they
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

namespace ziggurat {

struct RankChannels {
  explicit RankChannels(Communicator& ranks) {
    std::vector<int> all(static_cast<std::size_t>(ranks.world_size()));
    std::iota(all.begin(), all.end(), 0);
    for (auto* channel : {&params, &grads, &steps, &store}) *channel = ranks.split(all);
  }

  std::unique_ptr<Communicator> params;  ///< gathers, in the order of use or of units
  std::unique_ptr<Communicator> grads;   ///< reductions, in the order of finish_gradient()
  std::unique_ptr<Communicator> steps;   ///< one call a step(), with its norm
  std::unique_ptr<Communicator> store;  ///< agreements of the store: at open, then one a generation
};

}  // namespace ziggurat
