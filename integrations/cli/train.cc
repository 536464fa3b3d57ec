// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train.cc: `ziggurat train`: runs the steps of a run, and reports on them.
//
// The order at the end of a step is a promise: the loss line is flushed before Engine::step() is
// called, so a generation that is durable has its line, and a run that was killed and resumed has
// every line at least once.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/bytes.h"
#include "collectives/rank_options.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/interrupt.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/store_paths.h"
#include "integrations/cli/train_run.h"

namespace ziggurat::cli {
namespace {

/// The most held-out sequences that an evaluation reads. They are the same each time.
constexpr std::uint64_t kEvaluationSequencesMax = 32;
/// A run of at most this many steps prints one plain line for each step.
constexpr std::uint64_t kShortRunSteps = 200;

}  // namespace

/// Shares this rank's loss and the requests that have reached it. Returns those of all ranks
/// together.
TrainRanks::Shared TrainRun::share(double loss, std::uint64_t step) {
  const TrainRanks::Shared shared = ranks_->share({.loss = loss,
                                                   .interrupted = interrupt_requested(),
                                                   .save = take_save_request() || save_due(step)});
  interrupted_ = shared.interrupted;
  if (!shared.save) return shared;
  take_save_request();  // forgets the same request if it reached this rank late
  save_waits_ = !options_.checkpoint.directory.empty();
  if (!save_waits_)
    console_.line("SIGUSR1 asks for a checkpoint, but there is no --checkpoint-dir to put it into");
  return shared;
}

/// Makes one attempt at the next step. Micro-batches are dealt out to the data-parallel ranks in
/// turn, so that N ranks with K micro-batches each see what one rank with N x K sees.
StepRecord TrainRun::step() {
  const std::uint64_t index = engine_->generation();
  StepTimes times;
  const double begin = now_s();
  std::vector<gpt::Batch> batches;
  for (std::int64_t micro = 0; micro < options_.shape.accumulate; ++micro) {
    batches.push_back(text_->training_batch(
        {.seed = options_.seed,
         .step = attempts_,
         .micro = static_cast<std::uint64_t>(micro * place_.data_ranks() + place_.data)},
        options_.shape.batch));
  }
  const double data_end = now_s();
  const CounterSnapshot at_begin = CounterSnapshot::of(runtime_->metrics);
  const gpt::ComputeSeconds compute_before = trainer_->compute_seconds();
  const ScheduledStep planned = scheduled(options_.schedule.schedule, index);
  StepOptions options{.learning_rate = static_cast<float>(planned.learning_rate),
                      .betas = planned.betas,
                      .blob = {}};
  if (scaler_) options.loss_scale = static_cast<float>(scaler_->scale());
  engine_->prepare_step(options);

  StepRecord record;
  record.step = index + 1;
  record.loss_scale = options.loss_scale;
  const double loss = trainer_->forward_backward(batches, options.loss_scale.value_or(1.0F));
  const TrainRanks::Shared shared = share(loss, record.step);
  record.loss = static_cast<float>(shared.loss);
  record.learning_rate = options.learning_rate;
  const double passes_end = now_s();
  const CounterSnapshot after_passes = CounterSnapshot::of(runtime_->metrics);
  const gpt::ComputeSeconds compute_after = trainer_->compute_seconds();
  if (options_.print_loss_bits) {
    // Where steps can be skipped, several attempts may have the number of one step.
    const std::string attempt = scaler_ ? fmt::format(" attempt {}", attempts_ + 1) : "";
    console_.line(fmt::format("step {}{} loss-bits 0x{:08x}", record.step, attempt,
                              std::bit_cast<std::uint32_t>(record.loss)));
  }

  const RunState after = state_after(record.step);
  const std::vector<std::byte> blob = after.encode();
  options.blob = blob;
  const CheckpointRequest request = checkpoint_request(after);
  const bool last = shared.interrupted || record.step == options_.steps;
  if (!options_.checkpoint.directory.empty() && (save_waits_ || last))
    options.checkpoint = &request;
  const StepResult result = engine_->step(options);
  note_save(options.checkpoint != nullptr, result, record.step);
  ++attempts_;
  if (scaler_) scaler_->update(result.skipped);
  const double end = now_s();
  const CounterSnapshot at_end = CounterSnapshot::of(runtime_->metrics);

  record.grad_norm = result.grad_norm;
  record.clipped = result.clipped;
  record.skipped = result.skipped;
  record.durable_generation = engine_->durable_generation();
  record.wall_s = end - begin;
  times.data_s = data_end - begin;
  times.passes_s = passes_end - data_end;
  times.step_call_s = end - passes_end;
  times.forward_compute_s = compute_after.forward - compute_before.forward;
  times.backward_compute_s = compute_after.backward - compute_before.backward;
  times.passes = after_passes - at_begin;
  times.step_call = at_end - after_passes;
  record.split = split_of(times);
  record.counters = at_end - at_begin;
  return record;
}

/// Returns the state with which a run resumes at `step`, if this attempt makes that step. A skipped
/// attempt makes nothing durable, so a resumed run makes it and skips it again.
RunState TrainRun::state_after(std::uint64_t step) const {
  RunState state{.steps_done = step,
                 .attempts = attempts_ + 1,
                 .loss_scale = {},
                 .settings = settings_,
                 .best = best_};
  if (scaler_) {
    LossScaler after = *scaler_;
    after.update(/*overflow=*/false);
    state.loss_scale = after.state();
  }
  return state;
}

RunState TrainRun::state_now() const {
  RunState state{.steps_done = engine_->generation(),
                 .attempts = attempts_,
                 .loss_scale = {},
                 .settings = settings_,
                 .best = best_};
  if (scaler_) state.loss_scale = scaler_->state();
  return state;
}

double TrainRun::held_out_loss() {
  const auto batch = static_cast<std::uint64_t>(options_.shape.batch);
  const std::uint64_t sequences = std::min(text_->held_out_count(), kEvaluationSequencesMax);
  const auto ranks = static_cast<std::uint64_t>(place_.data_ranks());
  // Batches are dealt out to the ranks in turn, the same number to each.
  const std::uint64_t turns = (std::max<std::uint64_t>(1, sequences / batch) + ranks - 1) / ranks;
  std::vector<gpt::Batch> batches;
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    const std::uint64_t index = turn * ranks + static_cast<std::uint64_t>(place_.data);
    batches.push_back(text_->held_out_batch(index, options_.shape.batch));
  }
  return ranks_->mean(trainer_->evaluate(batches));
}

void TrainRun::note_best(std::uint64_t step, double loss) {
  if (!best_ || loss < best_->value) best_ = BestStep{step, loss};
}

void TrainRun::show(const StepRecord& record) {
  if (record.skipped) {
    console_.line(
        fmt::format("step {}/{} was skipped: its gradients overflow at loss scale {}; the next "
                    "attempt has loss scale {}",
                    record.step, options_.steps, *record.loss_scale, scaler_->scale()));
    return;
  }
  const double wall_s = log_.recent_wall_s();
  const double left_s = wall_s * static_cast<double>(options_.steps - record.step);
  std::size_t longest = 0;
  for (std::size_t i = 1; i < kWaits; ++i) {
    if (record.split.wait_s[i] > record.split.wait_s[longest]) longest = i;
  }
  const double waited = record.wall_s > 0 ? record.split.waiting_s() / record.wall_s : 0;
  const std::string where = waited < 0.01
                                ? "no waiting"
                                : fmt::format("waited {:.0f} %, most for {}", 100 * waited,
                                              link_of(static_cast<Wait>(longest),
                                                      engine_->placement(), ranks_->count() > 1));
  const std::string held_out =
      record.held_out_loss ? fmt::format(" held-out {:.4f}", *record.held_out_loss) : "";
  const std::string scale =
      record.loss_scale ? fmt::format("  loss scale {}", *record.loss_scale) : "";
  console_.live(
      fmt::format("step {}/{}  loss {:.4f}{}{}  {:.0f} tokens/s  {}  ETA {}:{:02}", record.step,
                  options_.steps, record.loss, held_out, scale,
                  wall_s > 0 ? static_cast<double>(tokens_per_step()) / wall_s : 0.0, where,
                  static_cast<std::uint64_t>(left_s) / 60, static_cast<std::uint64_t>(left_s) % 60),
      options_.steps <= kShortRunSteps || record.step == options_.steps);
}

RunFacts TrainRun::facts() {
  RunFacts facts;
  facts.placement = engine_->placement();
  facts.state = options_.engine.optimizer.state;
  facts.parameters =
      gpt::make_spec(model_).count() / static_cast<std::uint64_t>(strategy_.update_shards());
  facts.dtype = options_.model.dtype;
  if (scaler_) facts.loss_scale = scaler_->scale();
  facts.tokens_per_step = tokens_per_step();
  facts.zero_stage = strategy_.zero_stage;
  facts.quantization = options_.engine.quantization;
  facts.reduce_dtype = options_.engine.reduce_dtype.value_or(options_.model.dtype);
  facts.read_ahead_bytes = engine_->read_ahead_bytes();
  facts.kept_record_bytes = engine_->kept_record_bytes();
  facts.store_bytes = stored_bytes(options_.engine.store);
  facts.profiled_nvme_bytes_per_s = profiled_nvme_bytes_per_s_;
  facts.device = device_->account();
  facts.host = engine_->host_account();
  if (ranks_->count() > 1) {
    facts.waited_for_s = ranks_->waited_for();
    facts.ranks = ranks_->all(own_figures(facts));
  }
  return facts;
}

RankFigures TrainRun::own_figures(const RunFacts& facts) {
  RankFigures own =
      rank_figures(log_.steady(), CounterSnapshot::of(runtime_->metrics) - at_first_step_);
  const Traffic traffic = ranks_->traffic();
  own.sent_here_bytes = traffic.same_host.payload_bytes;
  own.sent_away_bytes = traffic.other_hosts.payload_bytes;
  own.sent_frame_bytes = traffic.same_host.frame_bytes + traffic.other_hosts.frame_bytes;
  own.device_peak_bytes = facts.device.peak_bytes();
  own.host_peak_bytes = facts.host.peak_bytes();
  return own;
}

void TrainRun::finish_json(const RunReport& report) {
  if (!json_) return;
  nlohmann::json total = to_json(report);
  if (!saves_.empty()) total["saves"] = to_json(saves_);
  json_->finish(total);
}

/// Returns whether all reports were written. A report that could not be written does not end the
/// run, but its exit code is not 0.
bool TrainRun::reports_are_whole() {
  const bool trace = !runtime_->trace || runtime_->trace->flush();
  return trace && (!json_ || json_->whole()) && console_.whole();
}

/// Makes the steps durable before it waits for a checkpoint, because a save may take longer than a
/// scheduler waits before it kills this process.
void TrainRun::finish_interrupted() {
  engine_->make_durable();
  console_.line(
      fmt::format("the run was interrupted: generation {} of {} steps is durable in {}; the same "
                  "command goes on from there",
                  engine_->durable_generation(), options_.steps, options_.store));
  finish_saves();
  engine_->make_durable();
  RunReport report =
      make_report(facts(), log_, CounterSnapshot::of(runtime_->metrics) - at_first_step_);
  report.durable_generation = engine_->durable_generation();
  finish_json(report);
  ranks_->part();
}

void TrainRun::finish_done() {
  const double begin = now_s();
  engine_->make_durable();
  const double durable = now_s();
  finish_saves();
  RunReport report =
      make_report(facts(), log_, CounterSnapshot::of(runtime_->metrics) - at_first_step_);
  report.finish_s = durable - begin;
  report.held_out_loss = held_out_loss();
  engine_->make_durable();  // leaves nothing under way that other ranks wait for
  report.durable_generation = engine_->durable_generation();
  for (const std::string& line : table(report)) console_.line(line);
  if (options_.per_rank && ranks_->count() > 1)
    for (const std::string& line : rank_table(report)) console_.line(line);
  console_.line(
      fmt::format("generation {0} is durable in {1}; give more --steps to go on from there, or let "
                  "the model write with `ziggurat sample --store {1}`",
                  report.durable_generation, options_.store));
  finish_json(report);
  ranks_->part();
}

int TrainRun::run() {
  on_interrupt(OnInterrupt::kExit);
  if (rank_options().rank == 0) require_writable(options_.json_path);
  open();
  if (!options_.json_path.empty() && ranks_->first()) {
    const nlohmann::json run{{"model", to_string(model_)},
                             {"dtype", to_string(options_.model.dtype)},
                             {"settings", settings_},
                             {"optimizer", to_string(options_.engine.optimizer.state.optimizer)},
                             {"state_format", to_string(options_.engine.optimizer.state.format)},
                             {"tokens_per_step", tokens_per_step()},
                             {"ranks", ranks_->count()},
                             {"tensor_parallel", place_.tensor_ranks()},
                             {"resumed_at", engine_->generation()},
                             {"open_s", open_s_},
                             {"open_state_s", engine_->state_seconds()},
                             {"description", engine_->description()}};
    json_ = std::make_unique<JsonReport>(options_.json_path, run);
  }
  on_interrupt(OnInterrupt::kFinish);
  // The state of the last step was stored before the step was evaluated, so its held-out loss is
  // measured again.
  const std::uint64_t stands_at = engine_->generation();
  if (options_.checkpoint.keep_best && options_.eval_every > 0 && stands_at > 0 &&
      stands_at % options_.eval_every == 0 && (!best_ || best_->step != stands_at)) {
    note_best(stands_at, held_out_loss());
  }
  at_first_step_ = CounterSnapshot::of(runtime_->metrics);
  while (engine_->generation() < options_.steps) {
    StepRecord record = step();
    if (options_.eval_every > 0 && record.step % options_.eval_every == 0 && !record.skipped)
      record.held_out_loss = held_out_loss();
    if (record.held_out_loss) note_best(record.step, *record.held_out_loss);
    report_saves();
    log_.add(record);
    if (json_) json_->add_step(to_json(record));
    show(record);
    compare_with_plan(record);
    if (interrupted_ || (ranks_->count() == 1 && interrupt_requested())) {
      finish_interrupted();
      return kExitInterrupted;
    }
  }
  finish_done();
  return reports_are_whole() && !last_save_failed_ ? 0 : kExitWorld;
}

std::optional<std::string> TrainRun::safe() const {
  if (!engine_) return std::nullopt;
  return fmt::format("generation {} in {} is durable: the same command goes on from there",
                     engine_->durable_generation(), options_.store);
}

bool TrainRun::hangs() const noexcept {
  try {
    if (!engine_) return false;
    // A save that is known to hang was waited for before.
    if (!engine_->saves_hang()) engine_->finish_saves();
    return engine_->saves_hang();
  } catch (const std::exception&) {
    return false;
  }
}

int train(const TrainOptions& options) {
  struct Ending {
    /// Does not destroy a run whose save hangs, because that would wait for good. The process ends
    /// soon anyway.
    ~Ending() {
      if (run->hangs()) static_cast<void>(run.release());
    }
    std::unique_ptr<TrainRun> run;
  };
  const Ending ending{std::make_unique<TrainRun>(options)};
  TrainRun& run = *ending.run;
  try {
    return run.run();
  } catch (const Error& error) {
    std::vector<std::string> lines = advice(error, options, run.threads(), run.strategy());
    if (!lines.empty()) lines.insert(lines.begin(), "these changes help, the most helpful first:");
    if (dynamic_cast<const StoreLost*>(&error) != nullptr && options.checkpoint.directory.empty()) {
      lines.emplace_back(
          "if the run wrote checkpoints, the same command with their --checkpoint-dir goes on from "
          "the newest one that verifies, and keeps the files of the lost store");
    }
    if (const std::optional<std::string> safe = run.safe()) lines.push_back(*safe);
    throw AdvisedError(error, std::move(lines));
  }
}

}  // namespace ziggurat::cli
