// SPDX-License-Identifier: Apache-2.0
// collectives/rank_options.h: which rank this process is, and where the others are met.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/runtime/clock.h"
#include "base/topology/core_budget.h"

namespace ziggurat {

struct RankOptions {
  int rank = 0;
  int world_size = 1;
  std::string source;      ///< the variables that say so; empty: a process on its own
  std::string rendezvous;  ///< HOST:PORT, an address of rank 0's machine; empty with one rank
  std::string rendezvous_source;
  std::string secret;  ///< that all ranks of the job know
  /// No secret where others than this machine can reach: anybody there could join.
  bool without_secret = false;
  bool through_memory = true;  ///< between ranks of a host, where it can be read
  Nanoseconds connect_timeout{std::chrono::minutes(5)};  ///< for all ranks to come
  Nanoseconds call_timeout{std::chrono::minutes(10)};    ///< ExchangeOptions::timeout
};

/// As the launcher says (base/topology/core_budget.h), and:
/// ZIGGURAT_RENDEZVOUS=HOST:PORT, else MASTER_ADDR and the port after MASTER_PORT (which torchrun
/// listens on itself), else the first node of SLURM_STEP_NODELIST, else this machine where all
/// ranks are on it; ZIGGURAT_SECRET or ZIGGURAT_SECRET_FILE, ZIGGURAT_WITHOUT_SECRET=1,
/// ZIGGURAT_RANK_TIMEOUT=SECONDS, ZIGGURAT_RANKS=memory|tcp (how those of a host talk). Errors:
/// kInvalidArgument for what makes no sense, and for several hosts with no rendezvous.
RankOptions rank_options(const Environment& environment = process_environment);

}  // namespace ziggurat
