// SPDX-License-Identifier: Apache-2.0
// base/topology/core_budget.h: how many workers a rank starts and where, so that the ranks of a
// host share its cores instead of fighting for them.
//
// Each rank computes its own share from what all of them see alike: the launcher's count of ranks
// on this host, and the cores and the quota they may use. Nothing is held, so there is nothing to
// free when a rank is killed, and whoever takes its place gets the same share.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/topology/topology.h"

namespace ziggurat {

/// This process among the ranks on its host.
struct LocalRank {
  std::size_t rank = 0;
  std::size_t count = 1;
  std::string source;  ///< the variables that say so; empty: a process on its own
};

/// The value of an environment variable.
using Environment = std::function<std::optional<std::string>(const char* name)>;
std::optional<std::string> process_environment(const char* name);

/// As torchrun and DeepSpeed (LOCAL_RANK, LOCAL_WORLD_SIZE), Open MPI, Intel MPI and MPICH, or
/// Slurm say; the first whose variables are both set. Errors: kInvalidArgument for what is not a
/// rank below its count.
LocalRank local_rank(const Environment& environment = process_environment);

/// This process among all ranks of its job, on however many hosts.
struct WorldRank {
  std::size_t rank = 0;
  std::size_t count = 1;
  std::string source;  ///< the variables that say so; empty: a process on its own
};

/// By the same launchers. Errors: as local_rank's.
WorldRank world_rank(const Environment& environment = process_environment);

struct CoreBudget {
  std::size_t workers = 1;
  std::vector<int> cpus;  ///< the logical CPU of each worker; empty: not pinned
  std::string reason;     ///< in words
};

/// The share of `rank` in the physical cores of `topology` and in the quota (cgroup_cpus()):
/// neighbours in the order of nodes. With more ranks than cores each has one worker, which the
/// kernel places. A launcher that binds each rank to cores of its own has shared them out already.
CoreBudget core_budget(const Topology& topology, const LocalRank& rank, double quota_cpus);
/// The share of this process on this machine. Errors: local_rank's.
CoreBudget core_budget(const Topology& topology);

}  // namespace ziggurat
