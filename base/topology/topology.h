// SPDX-License-Identifier: Apache-2.0
// base/topology/topology.h: the machine as it is: cores, NUMA nodes, GPUs and drives, and who is
// near whom (hwloc).
//
// A snapshot of plain values, taken once; nothing here changes the machine or this process.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ziggurat {

struct NumaNode {
  int os_index = 0;
  std::uint64_t memory_bytes = 0;
  std::vector<int> cpus;  ///< logical CPUs this process may use
};

struct Accelerator {
  /// "cuda0", "nvml0"; the PCI address where no runtime that hwloc knows names it
  std::string name;
  int numa_node = -1;  ///< -1: unknown
};

/// A PCI device that hwloc found worth keeping, and the node it hangs on.
struct PciDevice {
  std::string address;  ///< "0000:65:00.0"
  int numa_node = -1;   ///< -1: unknown
};

struct Topology {
  std::string cpu_model;
  std::vector<NumaNode> nodes;  ///< DRAM nodes with CPUs only, ordered by os_index
  /// First logical CPU of each physical core this process may use, ordered by node: where workers
  /// are pinned.
  std::vector<int> physical_cores;
  /// Physical cores that this process's control group has, whatever the process is bound to.
  std::size_t group_cores = 0;
  std::vector<Accelerator> accelerators;
  std::vector<PciDevice> pci_devices;

  /// Memory is nearer to some cores than to others.
  bool has_several_nodes() const noexcept { return nodes.size() > 1; }
  /// CPUs of a node that this process may use; none where it is unknown.
  std::span<const int> cpus_of(int numa_node) const noexcept;
  /// -1 where unknown.
  int node_of_cpu(int cpu) const noexcept;

  /// Reads this machine. Logs HWLOC_* environment variables if set, since they change placement.
  /// Errors (all three): kUnavailable if hwloc cannot read the machine, kInvalidArgument for a bad
  /// file or description.
  static Topology discover();
  /// Reads an hwloc XML file or a synthetic description ("pack:2 core:4 pu:2"), for tests and
  /// planning.
  static Topology from_xml(const std::string& path);
  static Topology from_synthetic(const std::string& description);
};

/// NUMA node of the drive under `path` (or under its nearest existing parent) in `topology`. -1
/// where unknown: virtual machines, network and memory filesystems, a volume whose drives hang on
/// different nodes.
int numa_node_of_path(const std::string& path, const Topology& topology);

}  // namespace ziggurat
