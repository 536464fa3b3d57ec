// SPDX-License-Identifier: Apache-2.0
// collectives/rank_options.h: which rank this process is, and where ranks meet.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/runtime/clock.h"
#include "base/topology/core_budget.h"

namespace ziggurat {

/// What carries the calls of ranks. The bits are the same on all.
enum class Collectives : std::uint8_t {
  kAuto,  ///< ranks of a host read each other's memory if they can; otherwise sockets
  kTcp,   ///< sockets between all ranks
  kMpi,   ///< the MPI whose launcher started the ranks
  kNccl   ///< GPUs through NCCL; sockets for the rest
};
std::string_view to_string(Collectives collectives) noexcept;
/// Who adds what GPUs send to each other.
enum class Reduce : std::uint8_t {
  kRanks,  ///< the owner of each slice, in rank order: the bits of all other back-ends
  kNccl    ///< NCCL, in its own order: bits may change with ranks, machine and version
};
std::string_view to_string(Reduce reduce) noexcept;
/// Reads a name: "auto", "tcp", "mpi" or "nccl". Errors: kInvalidArgument, naming `source`.
Collectives collectives_of(std::string_view name, std::string_view source);

struct RankOptions {
  int rank = 0;
  int world_size = 1;
  std::string source;      ///< the variables that say so; empty for a process on its own
  std::string rendezvous;  ///< HOST:PORT, an address of rank 0's machine; empty if it is not known
  std::string rendezvous_source;
  bool one_host = false;  ///< the launcher says that all ranks are on this host
  /// The secret that all ranks of the job know. If it is empty, ranks of one host get one that only
  /// their user can get, and ranks of several hosts do not start.
  std::string secret;
  bool without_secret = false;  ///< ranks start without a secret, so whoever can connect could join
  Collectives collectives = Collectives::kAuto;
  Reduce reduce = Reduce::kRanks;                        ///< used with kNccl
  Nanoseconds connect_timeout{std::chrono::minutes(5)};  ///< how long to wait for all ranks to come
  Nanoseconds call_timeout{std::chrono::minutes(10)};    ///< ExchangeOptions::timeout

  bool through_memory() const noexcept {
    return collectives == Collectives::kAuto || collectives == Collectives::kNccl;
  }
};

/// Reads the launcher's variables (base/topology/core_budget.h) and ours. The rendezvous is
/// ZIGGURAT_RENDEZVOUS=HOST:PORT, otherwise MASTER_ADDR and the port after MASTER_PORT (torchrun
/// itself listens on MASTER_PORT), otherwise this machine if all ranks are on it, otherwise the
/// first node of SLURM_STEP_NODELIST. In the last two cases the port is made of SLURM_JOB_ID or
/// PMIX_NAMESPACE. If all ranks are on one host and none has a secret, rank 0 listens at another
/// port where this one is taken, and tells the others (rendezvous/local_secret.h). Further:
/// ZIGGURAT_SECRET or ZIGGURAT_SECRET_FILE, ZIGGURAT_WITHOUT_SECRET=1,
/// ZIGGURAT_RANK_TIMEOUT=SECONDS, ZIGGURAT_RANKS=auto|tcp|mpi|nccl (Collectives),
/// ZIGGURAT_REDUCE=ranks|nccl (Reduce). Errors: kInvalidArgument for any other value.
RankOptions rank_options(const Environment& environment = process_environment);

}  // namespace ziggurat
