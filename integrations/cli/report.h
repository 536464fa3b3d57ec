// SPDX-License-Identifier: Apache-2.0
// integrations/cli/report.h: the table that ends a run, and the same numbers as JSON.
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
#include "tiers/account.h"

namespace ziggurat {
struct SaveOutcome;
}

namespace ziggurat::cli {

/// What one rank did: means of its steady steps, and totals and peaks of the run.
struct RankFigures {
  double step_s = 0;
  double compute_s = 0;               ///< forward and backward
  double waited_ranks_s = 0;          ///< for other ranks
  double waited_tiers_s = 0;          ///< for everything else
  std::uint64_t sent_here_bytes = 0;  ///< payload to ranks of its host
  std::uint64_t sent_away_bytes = 0;  ///< and to others
  std::uint64_t sent_frame_bytes = 0;
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  std::uint64_t device_peak_bytes = 0;
  std::uint64_t host_peak_bytes = 0;
};
RankFigures rank_figures(const StepLog::Steady& steady, const CounterSnapshot& totals);

/// Everything the report is made from.
struct RunFacts {
  Placement placement;
  StateKind state;
  std::uint64_t parameters = 0;  ///< that this rank updates
  DType dtype = DType::kBFloat16;
  std::optional<double> loss_scale;  ///< as the run left it, where there is one
  std::uint64_t tokens_per_step = 0;
  std::uint64_t read_ahead_bytes = 0;   ///< Engine::read_ahead_bytes()
  std::uint64_t kept_record_bytes = 0;  ///< Engine::kept_record_bytes()
  std::uint64_t store_bytes = 0;        ///< of files, as allocated
  /// What the machine profile says of the store's drives together; 0: it does not know them.
  double profiled_nvme_bytes_per_s = 0;
  /// Where there are several: each one's figures, and the longest that any waited for each.
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
  std::uint64_t first_step = 0;  ///< from 1; 0 if no step was made
  std::size_t steps = 0;
  std::size_t skipped = 0;  ///< attempts whose gradients overflowed
  double wall_s = 0;        ///< of both
  double finish_s = 0;      ///< from the last step until it was durable
  double tokens_per_s = 0;
  double mean_loss_last_10 = 0;
  std::optional<double> held_out_loss;
  std::uint64_t durable_generation = 0;
  CounterSnapshot totals;  ///< from the first step until the last was durable
  StepLog::Steady steady;
  StepBound bound;  ///< of an average steady step: steps that waited for the norm, and that did not
  /// The drive's speed that it rests on: the profile's, or the run's best step's if that was
  /// faster.
  double bound_nvme_bytes_per_s = 0;
  double share = 0;  ///< bound / measured
};

/// The bound's inputs: of compute and the rest each part's best of the steady steps, not its mean,
/// which has in it what the bound must not know (waiting for a core, for memory); bytes split by
/// what each class of state does in a step.
StepWork step_work(const RunFacts& facts, const StepLog::Steady& steady);

/// Assembles the report. `totals` are those of the whole run, from the first step until the last
/// was durable. What ends it (finish_s, held_out_loss, durable_generation) is the caller's to fill
/// in.
RunReport make_report(const RunFacts& facts, const StepLog& log, const CounterSnapshot& totals);

/// Lines of at most 100 columns.
std::vector<std::string> table(const RunReport& report);
/// A line for each rank, and their heading.
std::vector<std::string> rank_table(const RunReport& report);

nlohmann::json to_json(const StepRecord& record);
nlohmann::json to_json(const RunReport& report);
/// Checkpoints, whole or not.
nlohmann::json to_json(const std::vector<SaveOutcome>& saves);

/// "NVMe", "host to device", ...: the links that `wait` waits for under `placement`.
std::string link_of(Wait wait, const Placement& placement, bool several_ranks);

}  // namespace ziggurat::cli
