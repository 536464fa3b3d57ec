// SPDX-License-Identifier: Apache-2.0
// base/topology/topology.cc: flattens hwloc's tree into what placement needs.
#include "base/topology/topology.h"

#include <fmt/format.h>
#include <hwloc.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "base/topology/block_device.h"

namespace ziggurat {
namespace {

struct DestroyTopology {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using HwlocTopology = std::unique_ptr<hwloc_topology, DestroyTopology>;

struct FreeBitmap {
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

HwlocTopology make_topology(hwloc_type_filter_e devices = HWLOC_TYPE_FILTER_KEEP_IMPORTANT) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) throw system_error(errno, "hwloc_topology_init");
  HwlocTopology topology(raw);
  // The "gl" component asks X servers for their GPUs, and tries 32 connections at each start. PCI
  // and CUDA tell what we need. The call fails if hwloc was built without the component, which is
  // as good.
  static_cast<void>(
      hwloc_topology_set_components(raw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "gl"));
  hwloc_topology_set_io_types_filter(raw, devices);
  return topology;
}

void load(hwloc_topology_t topology, ErrorCode code, const std::string& what) {
  if (hwloc_topology_load(topology) == 0) return;
  const int error_number = errno;
  throw Error(code, fmt::format("hwloc cannot load {}: {}", what, errno_text(error_number)),
              error_number);
}

/// Returns the CPUs that hwloc allows (cgroup) and, on this machine, to which this process is bound
/// (taskset, a launcher's binding).
Bitmap usable_cpus(hwloc_topology_t topology) {
  Bitmap cpus(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)));
  if (hwloc_topology_is_thissystem(topology) != 0) {
    const Bitmap bound(hwloc_bitmap_alloc());
    if (hwloc_get_cpubind(topology, bound.get(), HWLOC_CPUBIND_THREAD) == 0) {
      hwloc_bitmap_and(cpus.get(), cpus.get(), bound.get());
    }
  }
  return cpus;
}

std::vector<int> to_vector(hwloc_const_bitmap_t bitmap) {
  std::vector<int> indices;
  for (int i = hwloc_bitmap_first(bitmap); i >= 0; i = hwloc_bitmap_next(bitmap, i))
    indices.push_back(i);
  return indices;
}

Bitmap intersection(hwloc_const_bitmap_t a, hwloc_const_bitmap_t b) {
  Bitmap both(hwloc_bitmap_alloc());
  hwloc_bitmap_and(both.get(), a, b);
  return both;
}

/// Returns whether a node is DRAM: it has no subtype, or the subtype "DRAM". HBM, NVM and device
/// memory have other subtypes.
bool is_dram(hwloc_obj_t node) {
  return node->subtype == nullptr || std::strcmp(node->subtype, "DRAM") == 0;
}

/// Returns the machine's memory. A node's own count may lack kernel memory that was hot-plugged
/// into a small virtual machine.
std::uint64_t physical_memory_bytes() {
  const auto pages = ::sysconf(_SC_PHYS_PAGES);
  const auto page = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0
             ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page)
             : 0;
}

std::vector<NumaNode> read_nodes(hwloc_topology_t topology, hwloc_const_bitmap_t usable) {
  std::vector<hwloc_obj_t> objects;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    if (is_dram(node)) objects.push_back(node);
  }
  std::sort(objects.begin(), objects.end(),
            [](hwloc_obj_t a, hwloc_obj_t b) { return a->os_index < b->os_index; });

  std::vector<NumaNode> nodes;
  std::set<int> taken;  // memory without CPUs of its own is listed with its neighbour's CPUs: the
                        // first node keeps them
  for (hwloc_obj_t object : objects) {
    NumaNode node{.os_index = static_cast<int>(object->os_index),
                  .memory_bytes = object->attr->numanode.local_memory,
                  .cpus = {}};
    for (int cpu : to_vector(intersection(object->cpuset, usable).get())) {
      if (taken.insert(cpu).second) node.cpus.push_back(cpu);
    }
    if (!node.cpus.empty()) nodes.push_back(std::move(node));
  }
  if (nodes.size() == 1 && objects.size() == 1 && hwloc_topology_is_thissystem(topology) != 0) {
    nodes.front().memory_bytes = std::max(nodes.front().memory_bytes, physical_memory_bytes());
  }
  return nodes;
}

std::vector<int> read_physical_cores(hwloc_topology_t topology, hwloc_const_bitmap_t usable,
                                     const std::vector<NumaNode>& nodes) {
  std::map<int, std::size_t> node_of_cpu;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (int cpu : nodes[i].cpus) node_of_cpu[cpu] = i;
  }
  // If the machine does not report its cores, every logical CPU counts as one.
  const bool has_cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0;
  const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  std::vector<std::pair<std::size_t, int>> cores;
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_by_type(topology, type, core)) != nullptr;) {
    const int cpu = hwloc_bitmap_first(intersection(core->cpuset, usable).get());
    if (cpu < 0) continue;
    const auto node = node_of_cpu.find(cpu);
    cores.emplace_back(node != node_of_cpu.end() ? node->second : nodes.size(), cpu);
  }
  std::stable_sort(cores.begin(), cores.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<int> cpus;
  cpus.reserve(cores.size());
  for (const auto& [node, cpu] : cores) cpus.push_back(cpu);
  return cpus;
}

/// Returns the node to which `object` is attached, or -1 if there are several.
int node_near(hwloc_topology_t topology, hwloc_obj_t object) {
  const hwloc_obj_t ancestor = hwloc_get_non_io_ancestor_obj(topology, object);
  if (ancestor == nullptr || ancestor->nodeset == nullptr) return -1;
  return hwloc_bitmap_weight(ancestor->nodeset) == 1 ? hwloc_bitmap_first(ancestor->nodeset) : -1;
}

std::string pci_address(hwloc_obj_t device) {
  const auto& pci = device->attr->pcidev;
  return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", pci.domain, pci.bus, pci.dev, pci.func);
}

/// Returns how good a name for an accelerator is: CUDA's are best, then those of a management
/// library. 0 means that the name is not an accelerator's.
int rank_of_name(const std::string& name) {
  if (name.starts_with("cuda")) return 3;
  if (name.starts_with("nvml") || name.starts_with("rsmi")) return 2;
  if (name.starts_with("ze")) return 1;
  return 0;
}

bool is_nvidia_gpu(hwloc_obj_t device) {
  constexpr unsigned short kNvidia = 0x10de;
  constexpr unsigned short kDisplay = 0x03;  // the high byte of the class of VGA and 3D controllers
  const auto& pci = device->attr->pcidev;
  return pci.vendor_id == kNvidia && (pci.class_id >> 8) == kDisplay;
}

void read_devices(hwloc_topology_t topology, Topology& result) {
  std::map<hwloc_obj_t, Accelerator> by_device;
  for (hwloc_obj_t device = nullptr;
       (device = hwloc_get_next_pcidev(topology, device)) != nullptr;) {
    const int node = node_near(topology, device);
    result.pci_devices.push_back({pci_address(device), node});
    if (is_nvidia_gpu(device)) by_device[device] = {pci_address(device), node};
  }
  for (hwloc_obj_t device = nullptr;
       (device = hwloc_get_next_osdev(topology, device)) != nullptr;) {
    const std::string name = device->name != nullptr ? device->name : "";
    if (rank_of_name(name) == 0) continue;
    Accelerator& accelerator = by_device[device->parent];
    if (rank_of_name(name) > rank_of_name(accelerator.name)) {
      accelerator = {name, node_near(topology, device)};
    }
  }
  for (auto& [device, accelerator] : by_device)
    result.accelerators.push_back(std::move(accelerator));
  std::sort(result.accelerators.begin(), result.accelerators.end(),
            [](const Accelerator& a, const Accelerator& b) { return a.name < b.name; });
}

std::string read_cpu_model(hwloc_topology_t topology) {
  for (hwloc_obj_t object :
       {hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0), hwloc_get_root_obj(topology)}) {
    if (object == nullptr) continue;
    if (const char* model = hwloc_obj_get_info_by_name(object, "CPUModel")) return model;
  }
  return "unknown";
}

Topology flatten(hwloc_topology_t topology) {
  const Bitmap usable = usable_cpus(topology);
  Topology result;
  result.cpu_model = read_cpu_model(topology);
  result.nodes = read_nodes(topology, usable.get());
  result.physical_cores = read_physical_cores(topology, usable.get(), result.nodes);
  const Bitmap group(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)));
  result.group_cores = read_physical_cores(topology, group.get(), {}).size();
  read_devices(topology, result);
  return result;
}

void log_environment() {
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "HWLOC_", 6) == 0)
      log().warn("the environment variable {} is set and changes the topology that is found",
                 *entry);
  }
}

}  // namespace

std::span<const int> Topology::cpus_of(int numa_node) const noexcept {
  const auto node = std::ranges::find(nodes, numa_node, &NumaNode::os_index);
  return node == nodes.end() ? std::span<const int>() : std::span<const int>(node->cpus);
}

int Topology::node_of_cpu(int cpu) const noexcept {
  const auto node = std::ranges::find_if(nodes, [cpu](const NumaNode& its) {
    return std::ranges::find(its.cpus, cpu) != its.cpus.end();
  });
  return node == nodes.end() ? -1 : node->os_index;
}

Topology Topology::discover() {
  // hwloc calls libudev, which makes the key of its hash tables at first use without a lock.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  log_environment();
  const std::string what = "this machine's topology";
  HwlocTopology topology = make_topology(HWLOC_TYPE_FILTER_KEEP_NONE);
  load(topology.get(), ErrorCode::kUnavailable, what);
  if (Topology alone = flatten(topology.get()); !alone.has_several_nodes()) return alone;
  topology = make_topology();
  load(topology.get(), ErrorCode::kUnavailable, what);
  return flatten(topology.get());
}

Topology Topology::from_xml(const std::string& path) {
  const HwlocTopology topology = make_topology();
  if (hwloc_topology_set_xml(topology.get(), path.c_str()) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("cannot read {} as an hwloc XML file", path));
  }
  load(topology.get(), ErrorCode::kInvalidArgument, path);
  return flatten(topology.get());
}

Topology Topology::from_synthetic(const std::string& description) {
  const HwlocTopology topology = make_topology();
  if (hwloc_topology_set_synthetic(topology.get(), description.c_str()) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("'{}' is not an hwloc synthetic description; try 'pack:2 core:4 pu:2'",
                            description));
  }
  load(topology.get(), ErrorCode::kInvalidArgument, "'" + description + "'");
  return flatten(topology.get());
}

int numa_node_of_path(const std::string& path, const Topology& topology) {
  int found = -1;
  for (const std::string& address :
       internal::pci_addresses_of_device("", internal::block_device_of_path("", path))) {
    const auto device = std::find_if(topology.pci_devices.begin(), topology.pci_devices.end(),
                                     [&](const PciDevice& d) { return d.address == address; });
    if (device == topology.pci_devices.end() || device->numa_node < 0) return -1;
    if (found >= 0 && device->numa_node != found) return -1;
    found = device->numa_node;
  }
  return found;
}

}  // namespace ziggurat
