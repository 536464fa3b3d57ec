// SPDX-License-Identifier: Apache-2.0
// integrations/measure/optimizer_suite.h: how fast the optimizer updates records in memory, beside
// what memory gives a pass of the same traffic.
//
// Traffic is what the format names: the record read and written, a bf16 gradient read, a bf16
// parameter written where the record does not hold it. The ceiling moves the same bytes of the same
// streams in the same memory and computes nothing (optimizer_ceiling.h). Bandwidth drifts by
// minutes and by neighbours, so all its walks run after each turn of the kernel, and the fastest of
// all turns is the limit; the kernel's figure beside it is its median. What is timed is compared
// with the scalar specification first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "integrations/measure/measurement.h"
#include "optimizer/state_format.h"

namespace ziggurat::measure {

struct OptimizerBenchOptions {
  std::uint64_t params = 0;  ///< 0: 100 M, or as many as fit in half of the free memory
  std::size_t threads = 0;   ///< the most; 0: one per physical core
  std::vector<StateFormat> formats;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  std::vector<std::string> targets;  ///< instruction sets; empty: the best
  std::uint32_t rounds = 7;
};

struct OptimizerRow {
  StateFormat format;
  std::string target;
  std::size_t threads = 1;
  double record_bytes = 0;              ///< a parameter
  double moved_bytes = 0;               ///< a parameter: all that the update reads and writes
  std::vector<double> seconds;          ///< of each round
  std::vector<double> ceiling_seconds;  ///< the fastest walk of each round

  double params_per_s(std::uint64_t params) const;
  double gb_per_s(std::uint64_t params) const;
  double ceiling_gb_per_s(std::uint64_t params) const;
  double share() const;       ///< of the ceiling: its best, over the kernel's median
  double best_share() const;  ///< over the kernel's best
};

struct OptimizerBenchResult {
  std::uint64_t params = 0;  ///< whole records
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  std::string page_kind;
  std::uint32_t rounds = 0;
  std::vector<OptimizerRow> rows;
};

/// Errors: kResourceExhausted if `params` do not fit in the free memory; kInvalidArgument for more
/// threads than cores or an unknown target; kDataLoss if a kernel's bits are not the
/// specification's.
OptimizerBenchResult run_optimizer_bench(const OptimizerBenchOptions& options,
                                         const Progress& progress);

/// A heading, then a line a row.
std::vector<std::string> optimizer_table(const OptimizerBenchResult& result);
/// Everything, every round included.
std::string optimizer_json(const OptimizerBenchResult& result);

}  // namespace ziggurat::measure
