// SPDX-License-Identifier: Apache-2.0
// integrations/cli/doctor.cc: `ziggurat doctor`: what this machine offers, what is in force, and
// why not more.
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "aio/direct_file.h"
#include "aio/probe.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/runtime/reactor.h"
#include "base/topology/topology.h"
#include "integrations/cli/commands.h"
#include "integrations/gpt/trainer.h"
#include "optimizer/adamw.h"
#include "tiers/cuda_device.h"
#include "tiers/pinned_pool.h"

namespace ziggurat::cli {
namespace {

void say(std::string_view what, std::string_view text) { fmt::print("{:<14} {}\n", what, text); }

/// What fails is a finding, not the end of the list.
template <class Look>
void look(std::string_view what, const Look& action) {
  try {
    action();
  } catch (const std::exception& error) {
    say(what, fmt::format("unknown: {}", error.what()));
  }
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

void show_processors() {
  const Topology topology = Topology::discover();
  say("CPU", fmt::format("{}; {} physical cores for workers", topology.cpu_model,
                         topology.physical_cores.size()));
  for (const NumaNode& node : topology.nodes) {
    say("NUMA node", fmt::format("{}: {} of memory, {} CPUs", node.os_index,
                                 format_bytes(node.memory_bytes), node.cpus.size()));
  }
}

void show_instruction_sets() {
  say("SIMD", fmt::format("{} in use of {}; ZIGGURAT_SIMD=NAME forces one", simd_target(),
                          fmt::join(simd_targets(), ", ")));
}

void show_gpus() {
  const CudaInventory inventory = cuda_devices();
  for (const CudaInventory::Gpu& gpu : inventory.gpus) {
    say("GPU",
        fmt::format("cuda{}: {}, {} ({} free), PCI {}", gpu.index, gpu.name,
                    format_bytes(gpu.memory_bytes), format_bytes(gpu.free_bytes), gpu.pci_bus_id));
  }
  if (inventory.gpus.empty()) say("GPU", fmt::format("none: {}", inventory.why_none));
  if (!inventory.runtime_version.empty()) {
    say("CUDA", fmt::format("runtime {}, driver {}", inventory.runtime_version,
                            inventory.driver_version.empty() ? "none" : inventory.driver_version));
  }
}

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : format_bytes(limit);
}

/// The tightest memory.max above this process, cgroup v2; v1's limit_in_bytes.
std::string cgroup_text() {
  std::string where;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) where = line.substr(3);
  }
  for (std::filesystem::path path = where; !path.empty(); path = path.parent_path()) {
    const std::string text = first_line("/sys/fs/cgroup" + path.string() + "/memory.max");
    if (!text.empty() && text != "max")
      return fmt::format("{} ({})", format_bytes(std::stoull(text)), path.string());
    if (path == path.parent_path()) break;
  }
  const std::string v1 = first_line("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  if (!v1.empty() && std::stoull(v1) < (1ULL << 60)) return format_bytes(std::stoull(v1));
  return "no limit";
}

void show_memory() {
  struct rlimit memlock {};
  if (::getrlimit(RLIMIT_MEMLOCK, &memlock) == 0) {
    say("memlock", fmt::format("{}{}", limit_text(memlock.rlim_cur),
                               ::geteuid() == 0 ? " (root passes)" : ""));
  }
  say("cgroup memory", cgroup_text());
  const std::string thp = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  say("huge pages",
      fmt::format("{} reserved of 2 MiB, {} free; transparent: {}",
                  first_line("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
                  first_line("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
                  thp.empty() ? "not in this kernel" : thp));
}

std::string filesystem_name(long magic) {
  switch (static_cast<unsigned long>(magic)) {
    case 0xEF53:
      return "ext4";
    case 0x58465342:
      return "xfs";
    case 0x9123683E:
      return "btrfs";
    case 0x01021994:
      return "tmpfs";
    case 0x794C7630:
      return "overlayfs";
    case 0x6969:
      return "nfs";
    case 0x65735546:
      return "fuse";
    case 0x2FC12FC1:
      return "zfs";
    case 0xF2F52010:
      return "f2fs";
    default:
      return fmt::format("type 0x{:x}", static_cast<unsigned long>(magic));
  }
}

/// An unnamed file, opened as the store would be, written and read back by the probe.
void show_storage(const std::string& path) {
  struct statfs status {};
  if (::statfs(path.c_str(), &status) != 0) throw system_error(errno, path);
  const auto block = static_cast<std::uint64_t>(status.f_bsize);
  Reactor reactor;
  IoProbe probe;
  const std::unique_ptr<IoEngine> io = choose_io_engine(reactor, path, &probe);
  const FileHandle file = io->open(path, {.writable = true, .unnamed = true});
  const DirectAlignment alignment = io->alignment(file);
  io->close(file);
  say("path",
      fmt::format("{}: {}, {} of {} free, direct I/O aligned to {} in memory and {} in the file, "
                  "NUMA node {}",
                  path, filesystem_name(status.f_type), format_bytes(status.f_bavail * block),
                  format_bytes(status.f_blocks * block), format_bytes(alignment.memory_bytes),
                  format_bytes(alignment.offset_bytes), numa_node_of_path(path)));
  say("  files", fmt::format("{}, at most {} transfers of {} at once", io->description(),
                             io->queue_depth(), format_bytes(DirectFile::kBlockBytes)));
  for (const std::string& note : probe.notes) say("  note", note);
}

}  // namespace

int doctor(const std::vector<std::string>& paths) {
  look("CPU", show_processors);
  look("SIMD", show_instruction_sets);
  look("compute", [] { say("compute", gpt::numerics_fingerprint()); });
  look("GPU", show_gpus);
  look("memory", show_memory);
  for (const std::string& path : paths) {
    look("path", [&] { show_storage(path); });
  }
  const std::vector<std::string> degraded = degraded_modes();
  for (const std::string& mode : degraded) say("degraded", mode);
  if (degraded.empty()) say("degraded", "nothing");
  return 0;
}

}  // namespace ziggurat::cli
