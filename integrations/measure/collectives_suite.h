// SPDX-License-Identifier: Apache-2.0
// integrations/measure/collectives_suite.h: how fast ranks exchange, beside what plain sockets and
// plain copies give the same ranks in the same run.
//
// Bus bandwidth is what each rank must send, over the time: of n bytes on N ranks (N - 1) / N n for
// all_gather and reduce_scatter (n the whole), twice that for all_reduce, n for send. Its limits:
// plain sockets or messages, every rank to every other at once (send: one way), and all ranks
// copying n bytes each at once (collectives_limits.h).
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/runtime/worker_pool.h"
#include "collectives/rank_options.h"

namespace ziggurat::measure {

struct CollectivesBenchOptions {
  std::vector<Collectives> back_ends;
  std::size_t largest_bytes = 0;
  int rounds = 5;
};

struct CollectivesRow {
  std::string transport;  ///< "memory" (Collectives::kAuto), "tcp", "mpi", "nccl"
  std::string operation;
  std::size_t bytes = 0;
  double seconds = 0;  ///< median of the rounds
  double bus_gb_per_s = 0;
  double limit_gb_per_s = 0;
  std::string limit;  ///< of what
};

/// On every rank; rows are rank 0's. Errors: connect_ranks', and kDataLoss for a wrong sum.
std::vector<CollectivesRow> run_collectives_bench(Reactor& reactor, WorkerPool& workers,
                                                  RankOptions ranks,
                                                  const CollectivesBenchOptions& options);

/// Every row's figures, for --json.
nlohmann::json collectives_json(const std::vector<CollectivesRow>& rows);

/// A heading, then a line a row.
std::vector<std::string> collectives_table(const std::vector<CollectivesRow>& rows);

}  // namespace ziggurat::measure
