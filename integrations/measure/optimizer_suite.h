// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_suite.h: measures how fast the optimizer updates records in
// memory, and how fast memory is for a pass with the same traffic.
//
// The traffic follows from the format: the record is read and written, a bf16 gradient is read, and
// a bf16 parameter is written if the record does not hold it. The ceiling moves the same bytes of
// the same streams in the same memory and computes nothing (optimizer_ceiling.h). Bandwidth drifts
// within minutes and with other users of the machine. So all walks of the ceiling run after each
// turn of the kernel, and the fastest of all turns is the limit; the figure of the kernel is its
// median. Each kernel is compared with the scalar specification before it is timed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "integrations/measure/measurement.h"
#include "optimizer/state_format.h"

namespace ziggurat::measure {

struct OptimizerBenchOptions {
  std::uint64_t params = 0;  ///< 0 for 100 M, or as many as fit into half of the free memory
  std::size_t threads = 0;   ///< the largest number; 0 for one per physical core
  std::vector<StateFormat> formats;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  std::vector<std::string> targets;  ///< instruction sets; empty for the best one
  std::uint32_t rounds = 7;
  /// Whether an update verifies the old record's hash and takes the new one's, as a sweep does.
  bool hashed = false;
};

struct OptimizerRow {
  StateFormat format;
  std::string target;
  std::size_t threads = 1;
  double record_bytes = 0;              ///< bytes per parameter
  double moved_bytes = 0;               ///< bytes per parameter that the update reads and writes
  std::vector<double> seconds;          ///< of each round
  std::vector<double> ceiling_seconds;  ///< time of the fastest walk in each round

  double params_per_s(std::uint64_t params) const;
  double gb_per_s(std::uint64_t params) const;
  double ceiling_gb_per_s(std::uint64_t params) const;
  double share() const;       ///< the best time of the ceiling over the median time of the kernel
  double best_share() const;  ///< the best time of the ceiling over the best time of the kernel
};

struct OptimizerBenchResult {
  std::uint64_t params = 0;  ///< whole records
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  std::string page_kind;
  std::uint32_t rounds = 0;
  std::vector<OptimizerRow> rows;
};

/// Measures every format with every target and number of threads. Errors: kResourceExhausted if
/// `params` do not fit into the free memory; kInvalidArgument for more threads than cores or an
/// unknown target; kDataLoss if a kernel gives other bits than the specification.
OptimizerBenchResult run_optimizer_bench(const OptimizerBenchOptions& options,
                                         const Progress& progress);

/// Returns a heading, and then a line for each row.
std::vector<std::string> optimizer_table(const OptimizerBenchResult& result);
/// Returns all figures, with every round, as JSON.
std::string optimizer_json(const OptimizerBenchResult& result);

}  // namespace ziggurat::measure
