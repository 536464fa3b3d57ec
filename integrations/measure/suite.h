// SPDX-License-Identifier: Apache-2.0
// integrations/measure/suite.h: the whole benchmark. It decides which rows run, in which order,
// beside what, and how often.
//
// Each round repeats all rows. In a round fio's run of a row comes right after ours, and in every
// other round right before it, so that what the machine does meanwhile affects both.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "integrations/measure/measurement.h"
#include "integrations/measure/result.h"

namespace ziggurat::measure {

/// The smallest file that can be measured. It holds 12 records of a tile in both slots, and the two
/// halves of a mix.
inline constexpr std::uint64_t kSmallestFileBytes = 16 * 1024 * 1024;

struct BenchOptions {
  std::vector<std::string> paths;  ///< folders in which we make files of our own
  std::string file;                ///< or an existing file, which is only read
  std::uint64_t size_bytes = 0;    ///< size of our files; for `file`, 0 means all of it
  double seconds = 5;              ///< of a row
  std::uint32_t rounds = 1;
  std::uint32_t depth = 0;  ///< 0 to try a few and use the best
  std::uint32_t block_bytes = 0;
  bool with_fio = true;
  bool allow_raw_device = false;
  bool tune = false;
  double tune_seconds = 30;
  ModelShape model;
  std::vector<Workload> rows;  ///< empty for all rows

  bool wants(Workload workload) const;
};

/// Returns the GB that measuring a path will write after the first fill, with fio's share, if the
/// drive writes `gb_per_s`. Calculated from the plan alone.
double planned_write_gb(const BenchOptions& options, double gb_per_s) noexcept;

/// Runs the benchmark. Errors: kInvalidArgument for what cannot be measured, kResourceExhausted for
/// what does not fit, and those of the transfers.
BenchResult run_bench(const BenchOptions& options, const Progress& progress);

}  // namespace ziggurat::measure
