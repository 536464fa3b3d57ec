// SPDX-License-Identifier: Apache-2.0
// core/plan/node_plan.h: which NUMA node each chunk lives on: where its record, gradient and work
// item lie in host memory, and whose workers update it.
//
// An update passes a chunk's bytes through the CPU several times, a drive moves them once each way.
// So only nodes where this rank has workers count; among those, a chunk lives on its drive's. What
// has no drive on one of them (its state is in memory, the drive's node is not known, or all
// workers are elsewhere) is spread over them by the number of their workers. Never changes bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/topology/topology.h"
#include "core/plan/host_plan.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"
#include "tiers/pinned_pool.h"

namespace ziggurat {

struct NodeRequest {
  const Topology& topology;
  std::span<const int> worker_nodes;  ///< of each worker; empty: they are not pinned
  std::span<const int>
      chunk_drive_nodes;  ///< of the drive of each record, -1: unknown; may be empty
  const Placement& placement;
  std::uint64_t host_budget_bytes;
};

/// Both empty on a machine of one node: nothing is placed.
struct NodePlan {
  std::vector<PoolNode> pool;    ///< in proportion to the bytes of records that live there
  std::vector<int> chunk_nodes;  ///< by chunk
  std::string why_not;           ///< nothing is placed although there are several nodes
};

/// More than two parts of a pool may leave free memory in several pieces (tiers/pinned_pool.h).
/// Where the budget is so small that its longest lease might then not fit, nothing is placed.
NodePlan plan_nodes(const ChunkTable& table, const HostPlan& plan, const NodeRequest& request);

}  // namespace ziggurat
