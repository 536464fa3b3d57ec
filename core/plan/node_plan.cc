// SPDX-License-Identifier: Apache-2.0
// core/plan/node_plan.cc: places chunks first by their drives, then by the number of workers.
#include "core/plan/node_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"

namespace ziggurat {
namespace {

/// A NUMA node on which this rank has workers.
struct Used {
  int numa_node;
  std::uint64_t workers;
  std::uint64_t bytes = 0;         // of records that live on this node
  std::uint64_t spread_bytes = 0;  // of the records among them that have no drive on this node
};

std::vector<Used> nodes_with_workers(const NodeRequest& request) {
  std::vector<Used> used;
  for (const NumaNode& node : request.topology.nodes) {
    const auto pinned = std::ranges::count(request.worker_nodes, node.os_index);
    const std::uint64_t workers =
        request.worker_nodes.empty() ? node.cpus.size() : static_cast<std::uint64_t>(pinned);
    if (workers > 0) used.push_back({.numa_node = node.os_index, .workers = workers});
  }
  return used;
}

/// Returns the node with the fewest bytes per worker so far.
Used& least_loaded(std::vector<Used>& nodes) {
  return *std::ranges::min_element(nodes, [](const Used& a, const Used& b) {
    return a.spread_bytes * b.workers < b.spread_bytes * a.workers;
  });
}

/// Whether the longest lease fits beside all other memory, wherever that lies. Free memory is in at
/// most one piece for every two parts.
bool has_room_for_parts(std::size_t parts, const ChunkTable& table, const HostPlan& plan,
                        const NodeRequest& request) {
  if (parts <= 2) return true;
  std::uint64_t params_bytes = 0;
  std::uint64_t longest_bytes = plan.item_bytes;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    const std::uint64_t home_bytes = table.home_count(u) * table.element_bytes(u);
    longest_bytes = std::max(longest_bytes, home_bytes);
    if (request.placement.params == Tier::kHost && table.has_home(u)) params_bytes += home_bytes;
  }
  const std::uint64_t pieces = (parts + 1) / 2;
  return request.host_budget_bytes >= params_bytes + pieces * longest_bytes &&
         (plan.item_bytes == 0 || plan.items >= kWorkItemsWanted);
}

}  // namespace

NodePlan plan_nodes(const ChunkTable& table, const HostPlan& plan, const NodeRequest& request) {
  NodePlan result;
  if (!request.topology.has_several_nodes()) return result;
  std::vector<Used> nodes = nodes_with_workers(request);
  if (nodes.empty()) {
    result.why_not = "this rank does not know on which NUMA nodes its workers run";
    return result;
  }
  if (!has_room_for_parts(nodes.size(), table, plan, request)) {
    result.why_not = fmt::format("`host_memory` {} is too small to be divided among {} NUMA nodes",
                                 format_bytes(request.host_budget_bytes), nodes.size());
    return result;
  }
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const std::uint64_t record_bytes = table.chunk(id).record_bytes();
    const int drive =
        request.placement.optimizer == Tier::kNvme && id < request.chunk_drive_nodes.size()
            ? request.chunk_drive_nodes[id]
            : -1;
    auto home = std::ranges::find(nodes, drive, &Used::numa_node);
    if (drive < 0 || home == nodes.end()) {
      Used& least = least_loaded(nodes);
      least.spread_bytes += record_bytes;
      home = nodes.begin() + (&least - nodes.data());
    }
    home->bytes += record_bytes;
    result.chunk_nodes.push_back(home->numa_node);
  }
  for (const Used& node : nodes) {
    const std::span<const int> cpus = request.topology.cpus_of(node.numa_node);
    if (node.bytes > 0) {
      result.pool.push_back(
          {.numa_node = node.numa_node, .weight = node.bytes, .cpus = {cpus.begin(), cpus.end()}});
    }
  }
  return result;
}

}  // namespace ziggurat
