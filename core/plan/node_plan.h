// SPDX-License-Identifier: Apache-2.0
// core/plan/node_plan.h: chooses the NUMA node of each chunk. The chunk's record, gradient and work
// item lie in that node's host memory, and the node's workers update the chunk.
//
// An update passes a chunk's bytes through the CPU several times, but a drive moves them only once
// each way. So only nodes where this rank has workers are used. If the chunk's drive is on one of
// them, the chunk lives there. All other chunks are spread over these nodes in proportion to their
// workers: those whose state is in memory, whose drive's node is unknown, or whose drive is on a
// node without workers. The choice never changes bits of results.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/topology/topology.h"
#include "core/plan/host_plan.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {

struct NodeRequest {
  const Topology& topology;
  std::span<const int> worker_nodes;  ///< the node of each worker; empty if workers are not pinned
  std::span<const int>
      chunk_drive_nodes;  ///< the node of each record's drive, -1 if unknown; may be empty
  const Placement& placement;
  std::uint64_t host_budget_bytes;
};

/// The nodes that were chosen. The first two lists are empty if nothing is placed, as on a machine
/// with one node.
struct NodePlan {
  std::vector<PoolNode> pool;    ///< the nodes, weighted by the bytes of records that live there
  std::vector<int> chunk_nodes;  ///< the node of each chunk
  std::string why_not;  ///< the reason if nothing is placed although the machine has several nodes
};

/// Chooses the nodes. More than two parts of a pool may leave free memory in several pieces
/// (tiers/pool/pinned_pool.h). If the budget is so small that its longest lease might then not fit,
/// nothing is placed.
NodePlan plan_nodes(const ChunkTable& table, const HostPlan& plan, const NodeRequest& request);

}  // namespace ziggurat
