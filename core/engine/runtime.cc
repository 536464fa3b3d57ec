// SPDX-License-Identifier: Apache-2.0
// core/engine/runtime.cc: the order in which the parts of a Runtime are made and destroyed.
#include "core/engine/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "aio/probe.h"
#include "base/error.h"
#include "base/topology/core_budget.h"
#include "collectives/self_communicator.h"

namespace ziggurat {

namespace {

/// Returns the NUMA node of each pinned worker; empty on a machine with one node.
std::vector<int> nodes_of(const std::vector<int>& cpus, const Topology& topology) {
  std::vector<int> nodes;
  if (!topology.has_several_nodes()) return nodes;
  for (const int cpu : cpus) nodes.push_back(topology.node_of_cpu(cpu));
  return nodes;
}

}  // namespace

std::unique_ptr<Runtime> Runtime::create(const RuntimeOptions& options) {
  auto runtime = std::make_unique<Runtime>(options.clock);
  runtime->topology = options.topology ? *options.topology : Topology::discover();
  runtime->memory_policy = options.memory_policy;
  runtime->drive_node = options.drive_node;
  if (!runtime->drive_node) {
    runtime->drive_node = [&topology = runtime->topology](const std::string& directory) {
      return numa_node_of_path(directory, topology);
    };
  }
  const CoreBudget budget = core_budget(runtime->topology);
  const std::size_t threads = options.threads != 0 ? options.threads : budget.workers;
  const std::size_t cores = runtime->topology.physical_cores.size();
  const std::size_t logical = std::max(1U, std::thread::hardware_concurrency());
  if (threads > std::max<std::size_t>(logical, 4)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "`threads={}` is too many: this machine has {} logical CPUs and {} physical cores",
            threads, logical, cores));
  }
  if (!options.trace_path.empty()) runtime->trace = Trace::open(options.trace_path);
  WorkerPoolOptions pool{
      .threads = threads, .cpus = {}, .trace = runtime->trace.get(), .metrics = &runtime->metrics};
  if (options.pin && threads <= budget.cpus.size())
    pool.cpus.assign(budget.cpus.begin(),
                     budget.cpus.begin() + static_cast<std::ptrdiff_t>(threads));
  pool.nodes = runtime->worker_nodes = nodes_of(pool.cpus, runtime->topology);
  runtime->io_engine = options.io_engine;
  if (!runtime->io_engine) runtime->io_engine = ChooseIoEngine();
  runtime->workers = std::make_unique<WorkerPool>(std::move(pool));
  runtime->ranks = std::make_unique<SelfCommunicator>();
  runtime->reactor.start();
  return runtime;
}

Runtime::~Runtime() {
  reactor.destroy(ranks);
  twin.reset();
  workers.reset();  // finishes queued jobs, whose completions still post to the reactor
  if (own_reactor) own_reactor->stop();
}

}  // namespace ziggurat
