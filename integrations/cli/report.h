// SPDX-License-Identifier: Apache-2.0
// integrations/cli/report.h: makes the table that ends a run, and the same figures as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "core/plan/step_bound.h"
#include "core/sharding/placement.h"
#include "core/sharding/quantization.h"
#include "integrations/cli/step_log.h"
#include "optimizer/state_format.h"
#include "tiers/pool/account.h"

namespace ziggurat {
struct SaveOutcome;
}

namespace ziggurat::cli {

/// The figures of one rank: means of its steady steps, and totals and peaks of the run.
struct RankFigures {
  double step_s = 0;
  double compute_s = 0;               ///< forward and backward
  double waited_ranks_s = 0;          ///< for other ranks
  double waited_tiers_s = 0;          ///< for everything else
  std::uint64_t sent_here_bytes = 0;  ///< payload to ranks of the same host
  std::uint64_t sent_away_bytes = 0;  ///< payload to ranks of other hosts
  std::uint64_t sent_frame_bytes = 0;
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  std::uint64_t device_peak_bytes = 0;
  std::uint64_t host_peak_bytes = 0;
};
RankFigures rank_figures(const StepLog::Steady& steady, const CounterSnapshot& totals);

/// The facts from which the report is made.
struct RunFacts {
  Placement placement;
  StateKind state;
  std::uint64_t parameters = 0;  ///< those that this rank updates
  DType dtype = DType::kBFloat16;
  std::optional<double> loss_scale;  ///< at the end of the run, if there is one
  std::uint64_t tokens_per_step = 0;
  std::uint64_t read_ahead_bytes = 0;   ///< Engine::read_ahead_bytes()
  std::uint64_t kept_record_bytes = 0;  ///< Engine::kept_record_bytes()
  std::uint64_t store_bytes = 0;        ///< of the store's files, as allocated
  /// The speed of all drives of the store together in the machine profile; 0 if the profile does
  /// not have them.
  double profiled_nvme_bytes_per_s = 0;
  /// The figures of each rank, if there are several. waited_for_s has the longest time that any
  /// rank waited for each.
  std::vector<RankFigures> ranks{};
  int zero_stage = 0;
  DType reduce_dtype = DType::kBFloat16;
  Quantization quantization;
  std::vector<double> waited_for_s{};
  Account device{0};
  Account host{0};
};

struct RunReport {
  RunFacts facts;
  std::uint64_t first_step = 0;  ///< its number, from 1; 0 if no step was made
  std::size_t steps = 0;
  std::size_t skipped = 0;  ///< attempts whose gradients overflowed
  double wall_s = 0;        ///< of all attempts
  double finish_s = 0;      ///< time from the last step until it was durable
  double tokens_per_s = 0;
  double mean_loss_last_10 = 0;
  std::optional<double> held_out_loss;
  std::uint64_t durable_generation = 0;
  CounterSnapshot totals;  ///< counted from the first step until the last was durable
  StepLog::Steady steady;
  StepBound bound;  ///< the bound of an average steady step, whether it waited or not
  /// The speed of the drive in the bound: that of the profile, or of the run's best step if that
  /// was faster.
  double bound_nvme_bytes_per_s = 0;
  double share = 0;  ///< bound / measured
};

/// Returns the inputs of the bound. Compute and the rest are the best of each part in the steady
/// steps: a mean would include waiting for a core or for memory, which the bound must not count.
/// Bytes are divided by what each class of state does in a step.
StepWork step_work(const RunFacts& facts, const StepLog::Steady& steady);

/// Assembles the report. `totals` are counted from the first step until the last one was durable.
/// The caller must fill in finish_s, held_out_loss and durable_generation.
RunReport make_report(const RunFacts& facts, const StepLog& log, const CounterSnapshot& totals);

/// Returns the table in lines of at most 100 columns.
std::vector<std::string> table(const RunReport& report);
/// Returns a heading and a line for each rank.
std::vector<std::string> rank_table(const RunReport& report);

nlohmann::json to_json(const StepRecord& record);
nlohmann::json to_json(const RunReport& report);
/// Describes the saves of checkpoints, also those that failed.
nlohmann::json to_json(const std::vector<SaveOutcome>& saves);

/// Returns the links that `wait` waits for under `placement`, such as "NVMe, then host to device".
std::string link_of(Wait wait, const Placement& placement, bool several_ranks);

}  // namespace ziggurat::cli
