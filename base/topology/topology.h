// SPDX-License-Identifier: Apache-2.0
// base/topology/topology.h: describes the machine: cores, NUMA nodes, GPUs and drives, and which
// are near each other (from hwloc).
//
// A snapshot of plain values, taken once; nothing in it changes the machine or this process.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ziggurat {

struct NumaNode {
  int os_index = 0;
  std::uint64_t memory_bytes = 0;
  std::vector<int> cpus;  ///< logical CPUs that this process may use
};

struct Accelerator {
  /// "cuda0", "nvml0"; the PCI address if no runtime that hwloc knows has a name for it
  std::string name;
  int numa_node = -1;  ///< -1 if unknown
};

/// A PCI device that hwloc keeps, and the NUMA node to which it is attached.
struct PciDevice {
  std::string address;  ///< "0000:65:00.0"
  int numa_node = -1;   ///< -1 if unknown
};

struct Topology {
  std::string cpu_model;
  std::vector<NumaNode> nodes;  ///< only DRAM nodes with CPUs, ordered by os_index
  /// The first logical CPU of each physical core that this process may use, ordered by node.
  /// Workers are pinned to these.
  std::vector<int> physical_cores;
  /// The number of physical cores of this process's control group, whatever the process is bound
  /// to.
  std::size_t group_cores = 0;
  std::vector<Accelerator> accelerators;
  std::vector<PciDevice> pci_devices;

  /// Returns whether memory is nearer to some cores than to others.
  bool has_several_nodes() const noexcept { return nodes.size() > 1; }
  /// Returns a node's CPUs that this process may use; none if the node is unknown.
  std::span<const int> cpus_of(int numa_node) const noexcept;
  /// Returns the NUMA node of a CPU; -1 if unknown.
  int node_of_cpu(int cpu) const noexcept;

  /// Reads this machine. If this process may use one node only, devices are left out: nothing is
  /// placed near them then, their registers take long to read, and CUDA would be started for the
  /// names of GPUs. Logs HWLOC_* environment variables that are set, because they change placement.
  /// Errors (of all three functions): kUnavailable if hwloc cannot read the machine,
  /// kInvalidArgument for a bad file or description.
  static Topology discover();
  /// Reads an hwloc XML file or a synthetic description ("pack:2 core:4 pu:2"), for tests and
  /// planning.
  static Topology from_xml(const std::string& path);
  static Topology from_synthetic(const std::string& description);
};

/// Returns the NUMA node of the drive under `path` (or under its nearest existing parent) in
/// `topology`. -1 if unknown: on virtual machines, network and memory filesystems, and volumes
/// whose drives are on different nodes.
int numa_node_of_path(const std::string& path, const Topology& topology);

}  // namespace ziggurat
