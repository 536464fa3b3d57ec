// SPDX-License-Identifier: Apache-2.0
// integrations/cli/doctor.cc: `ziggurat doctor`, which reports what this machine offers, what
// Ziggurat uses of it, and why it does not use more.
#include <errno.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "aio/direct_file.h"
#include "aio/file_lock.h"
#include "aio/probe.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/numerics/simd_target.h"
#include "base/runtime/reactor.h"
#include "base/topology/core_budget.h"
#include "base/topology/limits.h"
#include "base/topology/pci_link.h"
#include "base/topology/topology.h"
#include "collectives/exchange/peer_memory.h"
#include "collectives/mpi/mpi_link.h"
#include "collectives/nccl/nccl_device.h"
#include "collectives/rank_options.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/flag_words.h"
#include "integrations/gpt/trainer.h"
#include "tiers/device/cuda_device.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat::cli {
namespace {

void say(std::string_view what, std::string_view text) { fmt::print("{:<14} {}\n", what, text); }

/// Runs one of the checks. A check that fails is reported as a finding, and the next ones still
/// run.
template <class Look>
void look(std::string_view what, const Look& action) {
  try {
    action();
  } catch (const std::exception& error) {
    say(what, fmt::format("unknown: {}", error.what()));
  }
}

/// Maps a little memory on each NUMA node as the engine maps host memory, and reports where it was
/// placed.
void show_node_memory(const Topology& topology) {
  if (!topology.has_several_nodes()) {
    say("NUMA memory", "one node: nothing is placed, and the kernel is asked for nothing");
    return;
  }
  constexpr std::uint64_t kPartBytes = 2 * kMiB;
  HostMappingOptions options{.owner = "doctor's memory", .huge_pages = false};
  for (const NumaNode& node : topology.nodes) {
    options.parts.push_back(
        {.numa_node = node.os_index, .size_bytes = kPartBytes, .cpus = node.cpus});
    options.size_bytes += kPartBytes;
  }
  say("NUMA memory", HostMapping(options).placement());
  for (const Accelerator& gpu : topology.accelerators) {
    say("NUMA GPU", gpu.numa_node < 0 ? fmt::format("{}: node not known", gpu.name)
                                      : fmt::format("{}: node {}", gpu.name, gpu.numa_node));
  }
}

void show_processors() {
  const Topology topology = Topology::discover();
  const CoreBudget budget = core_budget(topology);
  say("CPU", topology.cpu_model);
  say("core budget",
      fmt::format("{} worker{}{} of {}", budget.workers, budget.workers == 1 ? "" : "s",
                  budget.cpus.empty() ? ", not pinned," : "", budget.reason));
  for (const NumaNode& node : topology.nodes) {
    say("NUMA node", fmt::format("{}: {} of memory, {} CPUs", node.os_index,
                                 format_bytes(node.memory_bytes), node.cpus.size()));
  }
  show_node_memory(topology);
}

void show_instruction_sets() {
  say("SIMD", fmt::format("{} in use of {}; ZIGGURAT_SIMD=NAME forces one", simd_target(),
                          fmt::join(simd_targets(), ", ")));
}

void show_gpus() {
  const CudaInventory inventory = cuda_devices();
  for (const CudaInventory::Gpu& gpu : inventory.gpus) {
    const std::string free =
        gpu.free_bytes ? format_bytes(*gpu.free_bytes) + " free" : "the free memory is not known";
    say("GPU", fmt::format("cuda{}: {}, {} ({}), PCI {}", gpu.index, gpu.name,
                           format_bytes(gpu.memory_bytes), free, gpu.pci_bus_id));
    const std::optional<PciLink> link = pci_link("", gpu.pci_bus_id);
    const char* const narrow = link && link->narrow() ? ": copies are as much slower" : "";
    say("GPU link", link ? link->text() + narrow : "not known");
  }
  if (inventory.gpus.empty()) say("GPU", in_flags(fmt::format("none: {}", inventory.why_none)));
  if (!inventory.runtime_version.empty()) {
    say("CUDA", fmt::format("runtime {}, driver {}", inventory.runtime_version,
                            inventory.driver_version.empty() ? "none" : inventory.driver_version));
  }
}

std::string limit_text(std::uint64_t limit) {
  return limit == kUnlimited ? "unlimited" : format_bytes(limit);
}

void show_memory() {
  say("memlock", fmt::format("{}{}", limit_text(memlock_limit_bytes()),
                             ::geteuid() == 0 ? " (root passes)" : ""));
  const CgroupMemory group = cgroup_memory();
  say("cgroup memory",
      group.version == 0
          ? "no memory controller in sight"
          : fmt::format("{} in {} (version {}), {} in use", limit_text(group.limit_bytes),
                        group.path, group.version, format_bytes(group.usage_bytes)));
  const HugePages pages = huge_pages();
  say("huge pages",
      fmt::format("{} of 2 MiB reserved, {} free; transparent: {}", pages.reserved, pages.free,
                  pages.transparent.empty() ? "not in this kernel" : pages.transparent));
  const int disabled = io_uring_disabled();
  say("kernel", fmt::format("{}; kernel.io_uring_disabled {}", kernel_release(),
                            disabled < 0 ? "is not there" : fmt::format("= {}", disabled)));
}

/// Returns the entries of a folder of /sys in order; none if the folder does not exist.
std::vector<std::filesystem::path> devices_in(const char* folder) {
  std::vector<std::filesystem::path> found;
  std::error_code absent;
  for (const auto& entry : std::filesystem::directory_iterator(folder, absent)) {
    found.push_back(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

/// Returns the first word of a file of /sys; empty if the device has no such file.
std::string word_of(const std::filesystem::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

/// Reports which transports can carry the ranks' messages, and which one is in use.
void show_carriers(const RankOptions& ranks) {
  const std::string why_not = why_not_readable(own_memory_probe());
  say("  transport",
      fmt::format("{} in use; --collectives auto|tcp|mpi|nccl, or ZIGGURAT_RANKS, chooses",
                  to_string(ranks.collectives)));
  say("    auto", why_not.empty() ? "on this host each other's memory (process_vm_readv), TCP "
                                    "between hosts"
                                  : "TCP, here over loopback: " + why_not);
  say("    mpi", mpi_inventory());
  const NcclInventory nccl = nccl_inventory();
  say("    nccl", nccl.found.empty() ? "none: " + in_flags(nccl.why_none) : nccl.found);
}

void show_ranks() {
  const RankOptions ranks = rank_options();
  say("ranks",
      ranks.world_size == 1
          ? "one: no launcher's variables (torchrun, mpirun, srun, ziggurat launch)"
          : fmt::format("rank {} of {} ({}), who meet at {} ({}), {}", ranks.rank, ranks.world_size,
                        ranks.source, ranks.rendezvous.empty() ? "no address" : ranks.rendezvous,
                        ranks.rendezvous_source,
                        ranks.secret.empty() ? "without a secret" : "with a secret"));
  show_carriers(ranks);
  for (const auto& device : devices_in("/sys/class/net")) {
    const std::string speed = word_of(device / "speed");
    say("  interface",
        fmt::format("{}: {}{}", device.filename().string(), word_of(device / "operstate"),
                    speed.empty() || speed == "-1" ? "" : ", " + speed + " Mbit/s"));
  }
  const auto rdma = devices_in("/sys/class/infiniband");
  for (const auto& device : rdma) {
    say("  RDMA", fmt::format("{}: by MPI or NCCL where they can; TCP goes over its interface",
                              device.filename().string()));
  }
  if (rdma.empty()) say("  RDMA", "no device");
}

/// Reports on the storage at `path`: opens an unnamed file there as a store would, which the probe
/// writes and reads back.
void show_storage(const std::string& path) {
  const std::string folder = nearest_existing(path);
  const Filesystem filesystem = filesystem_of(folder);
  const Topology topology = Topology::discover();
  const int node = numa_node_of_path(folder, topology);
  say("path",
      fmt::format("{}{}: {} on {}, {} of {} free{}{}", path,
                  folder == path ? "" : fmt::format(" (to be made in {})", folder), filesystem.type,
                  filesystem.source, format_bytes(filesystem.available_bytes),
                  format_bytes(filesystem.total_bytes), filesystem.read_only ? ", READ-ONLY" : "",
                  node >= 0                      ? fmt::format(", NUMA node {}", node)
                  : topology.has_several_nodes() ? ", NUMA node not known"
                                                 : ""));
  Reactor reactor;
  IoProbe probe;
  const std::unique_ptr<IoEngine> io = choose_io_engine(reactor, folder, &probe);
  const FileHandle file = io->open(folder, {.writable = true, .unnamed = true});
  const DirectAlignment alignment = io->alignment(file);
  io->close(file);
  say("  alignment",
      fmt::format("direct I/O: {} in memory, {} in the file", format_bytes(alignment.memory_bytes),
                  format_bytes(alignment.offset_bytes)));
  say("  files", fmt::format("{}; at most {} transfers of {} at once", io->description(),
                             io->queue_depth(), format_bytes(DirectFile::kBlockBytes)));
  say("  choice", "the first that works of io_uring, libaio, threads; ZIGGURAT_IO=NAME forces one");
  for (const std::string& note : probe.notes) say("  note", note);
}

}  // namespace

int doctor(const std::vector<std::string>& paths) {
  look("CPU", show_processors);
  look("SIMD", show_instruction_sets);
  look("compute", [] { say("compute", gpt::numerics_fingerprint()); });
  look("GPU", show_gpus);
  look("memory", show_memory);
  look("ranks", show_ranks);
  for (const std::string& path : paths) {
    look("path", [&] { show_storage(path); });
  }
  say("limits",
      fmt::format(
          "an interrupted transfer is tried {} times; a store in use is waited for {} s, and for "
          "{} s if its process has ended; {}",
          DirectFile::kRetriesMax, OpenOptions{}.lock_wait.count() / 1000,
          kLastWritesWait.count() / 1000,
          "workers: one for each physical core of the budget unless --threads says otherwise"));
  const std::vector<std::string> degraded = degraded_modes();
  for (const std::string& mode : degraded) say("degraded", mode);
  if (degraded.empty()) say("degraded", "nothing");
  return 0;
}

int doctor_train(const std::vector<std::string>& paths) {
  std::vector<std::string> words{"python3", "-m", "ziggurat", "doctor", "--train"};
  for (const std::string& path : paths) words.insert(words.end(), {"--path", path});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  fmt::print(
      stderr,
      "doctor --train runs {} with the PyTorch and the ziggurat package that this python3 finds\n",
      fmt::join(words, " "));
  ::execvp(arguments.front(), arguments.data());
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("doctor --train cannot start python3: {}; install Python, PyTorch and "
                          "the ziggurat package, which scripts/build-wheel makes",
                          errno_text(errno)),
              errno);
}

}  // namespace ziggurat::cli
