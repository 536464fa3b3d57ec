// SPDX-License-Identifier: Apache-2.0
// integrations/measure/rounds.h: runs all rows of one set of targets, round after round, and fio
// beside them.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "integrations/measure/streams.h"
#include "integrations/measure/suite.h"

namespace ziggurat::measure {

class Rounds {
 public:
  Rounds(Bench bench, const BenchOptions& options, std::vector<Target*> targets, AdamLoad& load,
         const ModelShape& model);

  SetResult run();

 private:
  bool ours() const { return targets_.front()->ours(); }
  void describe();
  void fill_first();
  void find_fio();
  void choose_depths();
  void measure_adam_alone();
  using Trial = std::function<TuneChoice(std::uint32_t depth)>;
  DepthChoice try_depths(std::uint32_t depth_max, const Trial& trial) const;
  std::uint32_t depth_for(std::uint64_t in_flight_bytes) const;
  DepthChoice best_depth(IoMix kind);
  DepthChoice best_fio_depth(IoMix kind);
  std::uint32_t depth_of(IoMix kind) const;
  void want(Target::Content content);
  void run_round(std::uint32_t round);
  void run_row(Row& row, std::uint32_t round);
  Measurement measure(Workload workload);
  Measurement stream(Workload workload);
  FioJob fio_job(IoMix kind) const;
  void run_fio(Row& row, IoMix kind);
  void judge_row(Measurement& measured) const;

  Bench bench_;
  const BenchOptions& options_;
  std::vector<Target*> targets_;
  AdamLoad& load_;
  const ModelShape& model_;
  std::optional<Fio> fio_;
  double pace_gb_per_s_ = 0;  // pace of the deadlines, from this round's read
  SetResult result_;
};

}  // namespace ziggurat::measure
