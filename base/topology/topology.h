// SPDX-License-Identifier: Apache-2.0
// base/topology/topology.h: the machine as it is: cores, NUMA nodes, GPUs and drives, and who is near whom (hwloc).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ziggurat {

struct NumaNode {
  int os_index = 0;
  std::uint64_t memory_bytes = 0;
  std::vector<int> cpus;  ///< logical CPUs this process may use
};

struct Accelerator {
  std::string name;     ///< "cuda0", "nvml0"
  int numa_node = -1;   ///< -1: unknown (virtual machines, one socket)
};

struct Topology {
  std::string cpu_model;
  std::vector<NumaNode> nodes;         ///< DRAM nodes with CPUs only, ordered by os_index
  /// First logical CPU of each physical core this process may use, ordered by node: where workers are pinned.
  std::vector<int> physical_cores;
  std::vector<Accelerator> accelerators;

  /// Reads this machine. Logs HWLOC_* environment variables if set, since they change placement.
  static Topology discover();
  /// Reads an hwloc XML file or a synthetic description ("pack:2 core:4 pu:2"), for tests and planning.
  static Topology from_xml(const std::string& path);
  static Topology from_synthetic(const std::string& description);
};

/// NUMA node of the block device under `path`, -1 where unknown (VMs, network and memory filesystems).
int numa_node_of_path(const std::string& path);

}  // namespace ziggurat
