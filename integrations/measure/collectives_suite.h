// SPDX-License-Identifier: Apache-2.0
// integrations/measure/collectives_suite.h: measures how fast ranks exchange data, and what plain
// sockets and plain copies reach between the same ranks in the same run.
//
// Bus bandwidth is the number of bytes that each rank must send, divided by the time. For n bytes
// on N ranks that number is (N - 1) / N n for all_gather, reduce_scatter and all_to_all, where n is
// the whole, twice that for all_reduce, and n for send. Its limit is what plain sockets or messages
// reach when every rank sends to every other at once (one way for send), or what all ranks reach
// when they copy memory at once (collectives_limits.h).
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
  std::string transport;  ///< the back end: "memory" (Collectives::kAuto), "tcp", "mpi" or "nccl"
  std::string operation;
  std::size_t bytes = 0;
  double seconds = 0;  ///< median time of the rounds
  double bus_gb_per_s = 0;
  double limit_gb_per_s = 0;
  std::string limit;  ///< what the limit was measured with: "socket", "message" or "copy"
};

/// Measures all back ends. Every rank must call it, and the rows of rank 0 count. Errors: those of
/// connect_ranks(), and kDataLoss for a wrong sum.
std::vector<CollectivesRow> run_collectives_bench(Reactor& reactor, WorkerPool& workers,
                                                  RankOptions ranks,
                                                  const CollectivesBenchOptions& options);

/// Returns the figures of every row, for --json.
nlohmann::json collectives_json(const std::vector<CollectivesRow>& rows);

/// Returns a heading, and then a line for each row.
std::vector<std::string> collectives_table(const std::vector<CollectivesRow>& rows);

}  // namespace ziggurat::measure
