// SPDX-License-Identifier: Apache-2.0
// collectives/rank_options.h: which rank this process is, and where ranks find each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/runtime/clock.h"
#include "base/topology/core_budget.h"

namespace ziggurat {

/// What carries what ranks say. The bits of all are the same.
enum class Collectives : std::uint8_t {
  kAuto,  ///< each other's memory between ranks of a host, where it can be read; sockets
  kTcp,   ///< sockets between all
  kMpi,   ///< the MPI whose launcher started the ranks
  kNccl   ///< GPUs; sockets for the rest
};
std::string_view to_string(Collectives collectives) noexcept;
/// Who adds what GPUs send each other.
enum class Reduce : std::uint8_t {
  kRanks,  ///< each owner, in rank order: the bits of all other back-ends
  kNccl    ///< NCCL, in an order of its own: bits may change with ranks, machine and version
};
std::string_view to_string(Reduce reduce) noexcept;
/// `name` is "auto", "tcp", "mpi" or "nccl". Errors: kInvalidArgument, naming `source`.
Collectives collectives_of(std::string_view name, std::string_view source);

struct RankOptions {
  int rank = 0;
  int world_size = 1;
  std::string source;      ///< the variables that say so; empty: a process on its own
  std::string rendezvous;  ///< HOST:PORT, an address of rank 0's machine; empty: not known
  std::string rendezvous_source;
  bool one_host = false;  ///< all ranks are on this one, the launcher says
  /// What all ranks of the job know. Empty: ranks of one host get one that only their user can
  /// get; those of several hosts do not start.
  std::string secret;
  bool without_secret = false;  ///< start all the same: whoever can connect could join
  Collectives collectives = Collectives::kAuto;
  Reduce reduce = Reduce::kRanks;                        ///< kNccl
  Nanoseconds connect_timeout{std::chrono::minutes(5)};  ///< for all ranks to come
  Nanoseconds call_timeout{std::chrono::minutes(10)};    ///< ExchangeOptions::timeout

  bool through_memory() const noexcept {
    return collectives == Collectives::kAuto || collectives == Collectives::kNccl;
  }
};

/// From what the launcher says (base/topology/core_budget.h), and from the environment:
/// ZIGGURAT_RENDEZVOUS=HOST:PORT, else MASTER_ADDR and the port after MASTER_PORT (which torchrun
/// listens on itself), else this machine where all ranks are on it, else the first node of
/// SLURM_STEP_NODELIST; the port, then, is the job's by SLURM_JOB_ID or PMIX_NAMESPACE;
/// ZIGGURAT_SECRET or ZIGGURAT_SECRET_FILE, ZIGGURAT_WITHOUT_SECRET=1,
/// ZIGGURAT_RANK_TIMEOUT=SECONDS, ZIGGURAT_RANKS=auto|tcp|mpi|nccl (Collectives),
/// ZIGGURAT_REDUCE=ranks|nccl (Reduce). Errors: kInvalidArgument for a value that is none of these.
RankOptions rank_options(const Environment& environment = process_environment);

}  // namespace ziggurat
