// SPDX-License-Identifier: Apache-2.0
// base/topology/core_budget.h: decides how many workers a rank starts and where, so that the ranks
// of a host share its cores without overlap.
//
// Each rank computes its own share from facts that all ranks see alike: the launcher's count of
// ranks on this host, and the cores and the quota that they may use. No lock or file is held, so
// nothing has to be freed when a rank is killed, and the rank that replaces it gets the same share.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/topology/topology.h"

namespace ziggurat {

/// The place of this process among the ranks on its host.
struct LocalRank {
  std::size_t rank = 0;
  std::size_t count = 1;
  std::string source;  ///< the variables that say so; empty for a process on its own
};

/// Returns the value of an environment variable.
using Environment = std::function<std::optional<std::string>(const char* name)>;
std::optional<std::string> process_environment(const char* name);

/// Reads what the launcher says: torchrun and DeepSpeed (LOCAL_RANK, LOCAL_WORLD_SIZE), Open MPI,
/// Intel MPI and MPICH, or Slurm; the first whose variables are both set. Errors: kInvalidArgument
/// if the rank is not below its count.
LocalRank local_rank(const Environment& environment = process_environment);

/// The place of this process among all ranks of its job, on all hosts.
struct WorldRank {
  std::size_t rank = 0;
  std::size_t count = 1;
  std::string source;  ///< the variables that say so; empty for a process on its own
};

/// Reads what the same launchers say. Errors: as local_rank's.
WorldRank world_rank(const Environment& environment = process_environment);

struct CoreBudget {
  std::size_t workers = 1;
  std::vector<int> cpus;  ///< the logical CPU of each worker; if empty, workers are not pinned
  std::string reason;     ///< explains the budget to the user
};

/// Returns the share of `rank` in the physical cores of `topology` and in the quota
/// (cgroup_cpus()). Its cores are neighbours in the order of nodes. With more ranks than cores each
/// rank gets one worker, which the kernel places. A launcher that binds each rank to its own cores
/// has shared them out already.
CoreBudget core_budget(const Topology& topology, const LocalRank& rank, double quota_cpus);
/// Returns the share of this process on this machine. Errors: local_rank's.
CoreBudget core_budget(const Topology& topology);

}  // namespace ziggurat
