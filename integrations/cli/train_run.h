// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_run.h: one run of `ziggurat train`, on one rank. Private to train.cc (its
// steps and reports), train_open.cc (what they need), train_auto.cc, train_begin.cc and
// train_checkpoints.cc.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collectives/mesh.h"
#include "core/checkpoint/state_content.h"
#include "core/engine/engine.h"
#include "core/engine/runtime.h"
#include "integrations/cli/console.h"
#include "integrations/cli/json_report.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/newest_checkpoint.h"
#include "integrations/cli/report.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/step_log.h"
#include "integrations/cli/train_auto.h"
#include "integrations/cli/train_options.h"
#include "integrations/cli/train_ranks.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/text.h"
#include "integrations/gpt/trainer.h"
#include "optimizer/loss_scale.h"
#include "tiers/device/host_device.h"

namespace ziggurat::cli {

/// Returns the seconds of a clock that only goes forward.
inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class TrainRun {
 public:
  explicit TrainRun(const TrainOptions& options) : options_(options) {}

  int run();
  std::size_t threads() const noexcept {
    return runtime_ ? runtime_->workers->threads() : std::max<std::size_t>(1, options_.threads);
  }
  /// Returns how the ranks divide the work, which is known once they are connected.
  const Strategy& strategy() const noexcept { return strategy_; }
  /// Returns a text on what is durable, for the end of an error message; none if the engine is not
  /// open.
  std::optional<std::string> safe() const;
  /// Waits for the save under way and returns whether its target hangs. Destroying this object
  /// would then wait for good.
  bool hangs() const noexcept;

 private:
  // train_begin.cc
  void open_checkpoints();
  void open_engine();
  void begin_engine();
  void begin_from(const std::string& path, const LoadOptions& options);
  void note_loaded(const StateSource& source);
  void go_on_from_newer();
  void replace_lost_store(const StoreLost& lost);
  std::optional<StateLine> line_of_all(const std::optional<StateLine>& own);
  void require_same_run(const StateContent& content, const std::string& from) const;
  std::string run_difference(const std::string& identity, int all_ranks, int tensor_parallel) const;

  // train_auto.cc
  void choose();
  void compare_with_plan(const StepRecord& record);

  // train_open.cc
  void open();
  void connect();
  EngineConfig engine_config();
  void announce();
  std::vector<StoreDirectory> measured_store();
  void resume();

  // train_checkpoints.cc
  bool save_due(std::uint64_t step) const;
  CheckpointRequest checkpoint_request(const RunState& state) const;
  void note_save(bool asked, const StepResult& result, std::uint64_t step);
  void report_saves(bool goes_on = true);
  void say_notes(const SaveOutcome& save);
  void finish_json(const RunReport& report);
  void finish_saves();

  // train.cc
  StepRecord step();
  TrainRanks::Shared share(double loss, std::uint64_t step);
  RunState state_after(std::uint64_t step) const;
  RunState state_now() const;
  double held_out_loss();
  void note_best(std::uint64_t step, double loss);
  void show(const StepRecord& record);
  bool reports_are_whole();
  void finish_interrupted();
  void finish_done();
  RunFacts facts();
  RankFigures own_figures(const RunFacts& facts);
  /// Returns the bytes that all ranks write together.
  WritePlan writes() const {
    return write_plan(options_, strategy_) * static_cast<std::uint64_t>(ranks_->count());
  }
  /// Over all ranks.
  std::uint64_t tokens_per_step() const {
    return static_cast<std::uint64_t>(options_.shape.tokens_per_step() * place_.data_ranks());
  }

  TrainOptions options_;  // with what choose() has chosen, once the ranks are connected
  Strategy strategy_;
  Console console_;
  std::unique_ptr<gpt::Text> text_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<TrainRanks> ranks_;
  Place place_;
  gpt::ModelConfig model_;  // this rank's part of the model
  std::unique_ptr<gpt::TensorRanks> tensor_ranks_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<gpt::Trainer> trainer_;
  double profiled_nvme_bytes_per_s_ = 0;  // the speed of the store's drives together
  std::unique_ptr<JsonReport> json_;
  ChangeableSettings settings_;
  std::optional<LossScaler> scaler_;
  std::uint64_t attempts_ = 0;               // at steps, including skipped ones; the data cursor
  bool replaces_store_ = false;              // the run replaces a store that is lost or older
  bool interrupted_ = false;                 // some rank was asked to end
  std::vector<SaveOutcome> saves_;           // the saves that ended, for --json
  double open_s_ = 0;                        // the time that opening the engine took
  bool save_waits_ = false;                  // a checkpoint is due but was not begun
  bool wait_was_said_ = false;               // of it
  std::optional<std::uint64_t> saved_step_;  // the step whose checkpoint was begun last
  double saved_at_s_ = now_s();   // time when the last checkpoint was begun, by this rank's clock
  std::optional<BestStep> best_;  // by held-out loss
  bool last_save_failed_ = false;
  std::set<std::string> notes_said_;               // the notes on what saves left in the folder
  std::unique_ptr<NewestCheckpoint> checkpoints_;  // null if there is no folder for checkpoints
  std::optional<TrainChoice> chosen_;              // if the run leaves something to `auto`
  bool compared_ = false;                          // with what the steps took
  StepLog log_;
  CounterSnapshot at_first_step_;
};

}  // namespace ziggurat::cli
