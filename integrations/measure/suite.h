// SPDX-License-Identifier: Apache-2.0
// integrations/measure/suite.h: the whole benchmark: which rows, in which order, beside what, how
// often.
//
// Rounds repeat all rows; in a round fio's run of a row stands right beside ours, before it in
// every other round, so that what the machine does meanwhile falls on both.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "integrations/measure/measurement.h"
#include "integrations/measure/result.h"

namespace ziggurat::measure {

/// Below this there is nothing to measure: 12 records of a tile in both slots, and a mix's halves.
inline constexpr std::uint64_t kSmallestFileBytes = 16 * 1024 * 1024;

struct BenchOptions {
  std::vector<std::string> paths;  ///< folders for files of our own
  std::string file;                ///< or somebody's, which is only read
  std::uint64_t size_bytes = 0;    ///< of our files; of `file`: 0 for all of it
  double seconds = 5;              ///< of a row
  std::uint32_t rounds = 1;
  std::uint32_t depth = 0;  ///< 0: the best of a few, tried first
  std::uint32_t block_bytes = 0;
  bool with_fio = true;
  bool allow_raw_device = false;
  bool tune = false;
  double tune_seconds = 30;
  ModelShape model;
  std::vector<Workload> rows;  ///< empty: all

  bool wants(Workload workload) const;
};

/// GB that measuring a path will write after the first fill, fio's share included, if the drive
/// writes `gb_per_s`. From the plan alone.
double planned_write_gb(const BenchOptions& options, double gb_per_s) noexcept;

/// Errors: kInvalidArgument for what cannot be measured, kResourceExhausted for what does not fit,
/// and those of the transfers.
BenchResult run_bench(const BenchOptions& options, const Progress& progress);

}  // namespace ziggurat::measure
