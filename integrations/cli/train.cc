// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train.cc: `ziggurat train`: opens what a run needs, runs its steps, and reports.
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
#include "collectives/rendezvous.h"
#include "core/engine/engine.h"
#include "core/engine/runtime.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/interrupt.h"
#include "integrations/cli/json_report.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/report.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/step_log.h"
#include "integrations/cli/store_paths.h"
#include "integrations/cli/train_ranks.h"
#include "integrations/gpt/text.h"
#include "integrations/gpt/trainer.h"
#include "optimizer/loss_scale.h"
#include "optimizer/simd_target.h"
#include "tiers/host_device.h"

namespace ziggurat::cli {
namespace {

namespace fs = std::filesystem;

/// Held-out sequences that an evaluation reads at most: the same ones each time.
constexpr std::uint64_t kEvaluationSequencesMax = 32;
/// A run of so many steps prints one plain line for each.
constexpr std::uint64_t kShortRunSteps = 200;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class TrainRun {
 public:
  explicit TrainRun(const TrainOptions& options) : options_(options) {}

  int run();
  std::size_t threads() const noexcept {
    return runtime_ ? runtime_->workers->threads() : std::max<std::size_t>(1, options_.threads);
  }
  /// What is durable, for the end of an error message.
  std::optional<std::string> safe() const;

 private:
  void open();
  void connect();
  EngineConfig engine_config();
  void announce();
  std::vector<StoreDirectory> measured_store();
  void resume();
  StepRecord step(bool interrupted);
  RunState state_after(std::uint64_t step) const;
  double held_out_loss();
  void show(const StepRecord& record);
  void finish_interrupted();
  void finish_done();
  RunFacts facts();
  /// Of the state that ranks write: in stage 0 each has the whole, with groups each of those.
  std::uint64_t copies() const {
    if (options_.shard_group > 0)
      return static_cast<std::uint64_t>(ranks_->count() / options_.shard_group);
    return options_.zero_stage == 0 ? static_cast<std::uint64_t>(ranks_->count()) : 1;
  }
  /// Of all ranks.
  std::uint64_t tokens_per_step() const {
    return static_cast<std::uint64_t>(options_.shape.tokens_per_step() * ranks_->count());
  }

  const TrainOptions& options_;
  Console console_;
  std::unique_ptr<gpt::Text> text_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<TrainRanks> ranks_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<gpt::Trainer> trainer_;
  std::unique_ptr<JsonReport> json_;
  ChangeableSettings settings_;
  std::optional<LossScaler> scaler_;
  std::uint64_t attempts_ = 0;  // at steps, skipped ones included: the data cursor
  bool interrupted_ = false;    // some rank was asked to end
  StepLog log_;
  CounterSnapshot at_first_step_;
};

void TrainRun::open() {
  const ModelSpec spec = gpt::make_spec(options_.model);
  text_ = std::make_unique<gpt::Text>(gpt::Text::load(options_.data, options_.shape.context));
  connect();
  require_device_budget(options_, threads());
  settings_ = changeable_settings(options_, threads());
  device_ = HostDevice::create(runtime_->reactor, options_.device_bytes, runtime_->trace.get(),
                               &runtime_->metrics);
  announce();

  engine_ = Engine::open(spec, engine_config(), *runtime_, *device_,
                         gpt::make_initializer(options_.model, options_.seed));
  for (const std::string& line : engine_->description()) console_.line("  " + line);
  if (options_.loss_scale.config) scaler_.emplace(*options_.loss_scale.config);
  if (engine_->resumed()) resume();
  if (scaler_) {
    console_.line(fmt::format("  loss scale {}{}", scaler_->scale(),
                              scaler_->dynamic() ? " for now: it is dynamic" : ""));
  }
  trainer_ = std::make_unique<gpt::Trainer>(*engine_, *device_, *runtime_->workers, options_.model,
                                            options_.shape);
}

/// This rank's runtime, and the others, if a launcher made us one of several.
void TrainRun::connect() {
  const RankOptions world = rank_options();
  if (options_.nproc > 1 && world.world_size != options_.nproc) {
    throw UsageError(
        fmt::format("--nproc {}: {} says that there are {} ranks: give that, or no "
                    "--nproc under a launcher",
                    options_.nproc, world.source, world.world_size));
  }
  std::string trace_path = options_.trace_path;
  if (world.rank > 0) {
    console_.silence();
    if (!trace_path.empty()) trace_path += fmt::format(".rank{}", world.rank);
  }
  runtime_ = Runtime::create({.threads = options_.threads, .trace_path = trace_path});
  runtime_->ranks = connect_ranks(runtime_->reactor, *runtime_->workers, world);
  ranks_ = std::make_unique<TrainRanks>(*runtime_);
}

EngineConfig TrainRun::engine_config() {
  EngineConfig config;
  config.store = measured_store();
  config.placement = options_.placement;
  config.host_budget_bytes = options_.host_bytes;
  config.trainer_device_bytes =
      gpt::Trainer::workspace_bytes(options_.model, options_.shape, threads());
  config.optimizer = options_.optimizer;
  config.param_groups = options_.param_groups;
  config.clip_norm = static_cast<float>(options_.clip_norm);
  config.speculation = options_.speculation;
  config.zero_stage = options_.zero_stage;
  config.keep_gathered = options_.keep_gathered;
  config.shard_group = options_.shard_group;
  config.node_ranks = options_.node_ranks;
  config.reduce_dtype = options_.reduce_dtype;
  config.reduce_bucket_elements = options_.reduce_bucket_elements;
  config.prefetch_elements_max = options_.prefetch_elements;
  config.slots = options_.slots;
  config.resume = options_.resume;
  config.run_identity = RunIdentity{.model = options_.model,
                                    .data_hash = text_->hash(),
                                    .seed = options_.seed,
                                    .batch = options_.shape.batch,
                                    .accumulate = options_.shape.accumulate,
                                    .context = options_.shape.context}
                            .text();
  config.numerics_fingerprint = gpt::numerics_fingerprint();
  config.progress = [this](const char* what, std::uint64_t done, std::uint64_t total) {
    console_.progress(what, done, total);
  };
  return config;
}

/// Several directories share a new store in proportion to their drives' speed, where it is known;
/// each drive is given as much at once as it was measured to need.
std::vector<StoreDirectory> TrainRun::measured_store() {
  std::vector<StoreDirectory> store = options_.store_directories;
  const auto profile = read_default_profile();
  if (!apply_profile(store, profile.value_or(MachineProfile{})) && store.size() > 1)
    console_.line(
        "  a new store is shared equally by its directories: their speeds are not in the machine "
        "profile (`ziggurat bench io --path DIR --path DIR2` measures them)");
  return store;
}

void TrainRun::announce() {
  const ModelSpec spec = gpt::make_spec(options_.model);
  console_.line(fmt::format("{}: {:.1f} M parameters in {}, {} of training state; {} of text in {}",
                            spec.name, static_cast<double>(spec.count()) / 1e6,
                            to_string(spec.dtype), format_bytes(training_state_bytes(options_)),
                            format_bytes(text_->size_bytes()), options_.data));
  if (ranks_->count() > 1) {
    console_.line(
        fmt::format("  {} ranks in ZeRO stage {}, each with these budgets and {} "
                    "micro-batches of a step",
                    ranks_->count(), options_.zero_stage, options_.shape.accumulate));
  }
  console_.line(
      fmt::format("  placement {}; device budget {}, host budget {}; {} workers, optimizer in {}",
                  to_string(options_.placement), format_bytes(options_.device_bytes),
                  format_bytes(options_.host_bytes), threads(), simd_target()));
  const bool fresh =
      options_.resume == EngineConfig::Resume::kNever || !store_exists(options_.store_directories);
  if (!fresh) return;  // the rest of the steps are known once the store is open
  const WritePlan plan = write_plan(options_) * copies();
  console_.line(fmt::format(
      "  the run will write {} to {}: {} to make the store, {} in each of {} steps{}; {}",
      gigabytes(plan.fill_bytes + plan.per_step_bytes * options_.steps + plan.at_end_bytes),
      options_.store, gigabytes(plan.fill_bytes), gigabytes(plan.per_step_bytes), options_.steps,
      plan.at_end_bytes > 0 ? fmt::format(", {} at the end", gigabytes(plan.at_end_bytes)) : "",
      free_space(options_.store_directories)));
}

void TrainRun::resume() {
  const std::uint64_t generation = engine_->generation();
  if (!engine_->resumed_blob().empty()) {
    const RunState before = RunState::decode(engine_->resumed_blob());
    if (before.steps_done != generation) {
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("--store {}: generation {} carries the trainer's state of step {}",
                              options_.store, generation, before.steps_done));
    }
    attempts_ = before.attempts;
    if (scaler_ && before.loss_scale)
      scaler_.emplace(*options_.loss_scale.config, *before.loss_scale);
    for (const std::string& line : differences(before.settings, settings_))
      console_.line("  changed: " + line);
  }
  const WritePlan plan = write_plan(options_) * copies();
  const std::uint64_t left = options_.steps - std::min(options_.steps, generation);
  console_.line(fmt::format(
      "resumed at step {} of {}; the rest will write {}; {}", generation, options_.steps,
      gigabytes(plan.per_step_bytes * left + (left > 0 ? plan.at_end_bytes : 0)),
      free_space(options_.store_directories)));
}

/// One attempt at the next step. Micro-batches are dealt out to the ranks in turn, so that N ranks
/// with K each see what one rank with N K sees.
StepRecord TrainRun::step(bool interrupted) {
  const std::uint64_t index = engine_->generation();
  StepTimes times;
  const double begin = now_s();
  std::vector<gpt::Batch> batches;
  for (std::int64_t micro = 0; micro < options_.shape.accumulate; ++micro) {
    batches.push_back(text_->training_batch(
        {.seed = options_.seed,
         .step = attempts_,
         .micro = static_cast<std::uint64_t>(micro * ranks_->count() + ranks_->rank())},
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
  const TrainRanks::Shared shared = ranks_->share(loss, interrupted);
  interrupted_ = shared.interrupted;
  record.loss = static_cast<float>(shared.loss);
  record.learning_rate = options.learning_rate;
  const double passes_end = now_s();
  const CounterSnapshot after_passes = CounterSnapshot::of(runtime_->metrics);
  const gpt::ComputeSeconds compute_after = trainer_->compute_seconds();
  if (options_.print_loss_bits) {
    // Where steps can be skipped, several attempts have one step's number.
    const std::string attempt = scaler_ ? fmt::format(" attempt {}", attempts_ + 1) : "";
    console_.line(fmt::format("step {}{} loss-bits 0x{:08x}", record.step, attempt,
                              std::bit_cast<std::uint32_t>(record.loss)));
  }

  const std::vector<std::byte> blob = state_after(record.step).encode();
  options.blob = blob;
  const StepResult result = engine_->step(options);
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

/// What a run that resumes at `step`, if this attempt makes it, needs. If it is skipped, nothing
/// becomes durable, and a resumed run makes and skips it again.
RunState TrainRun::state_after(std::uint64_t step) const {
  RunState state{
      .steps_done = step, .attempts = attempts_ + 1, .loss_scale = {}, .settings = settings_};
  if (scaler_) {
    LossScaler after = *scaler_;
    after.update(/*overflow=*/false);
    state.loss_scale = after.state();
  }
  return state;
}

double TrainRun::held_out_loss() {
  const auto batch = static_cast<std::uint64_t>(options_.shape.batch);
  const std::uint64_t sequences = std::min(text_->held_out_count(), kEvaluationSequencesMax);
  const auto ranks = static_cast<std::uint64_t>(ranks_->count());
  // Dealt out to the ranks in turn, to each as many.
  const std::uint64_t turns = (std::max<std::uint64_t>(1, sequences / batch) + ranks - 1) / ranks;
  std::vector<gpt::Batch> batches;
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    const std::uint64_t index = turn * ranks + static_cast<std::uint64_t>(ranks_->rank());
    batches.push_back(text_->held_out_batch(index, options_.shape.batch));
  }
  return ranks_->mean(trainer_->evaluate(batches));
}

void TrainRun::show(const StepRecord& record) {
  if (record.skipped) {
    console_.line(
        fmt::format("step {}/{} skipped: its gradients overflow at loss scale {}; the "
                    "next attempt has {}",
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
  const std::string where =
      waited < 0.01 ? "no waiting"
                    : fmt::format("waited {:.0f} %, most for {}", 100 * waited,
                                  link_of(static_cast<Wait>(longest), options_.placement));
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
  facts.placement = options_.placement;
  facts.state = options_.optimizer.state;
  facts.parameters = gpt::make_spec(options_.model).count();
  facts.dtype = options_.model.dtype;
  if (scaler_) facts.loss_scale = scaler_->scale();
  facts.clipping = options_.clip_norm > 0;
  facts.tokens_per_step = tokens_per_step();
  facts.ranks = ranks_->count();
  facts.zero_stage = options_.zero_stage;
  facts.reduce_dtype = options_.reduce_dtype.value_or(options_.model.dtype);
  const TrainRanks::Talk talk = ranks_->talk();
  facts.sent_here_bytes = talk.sent_here_bytes;
  facts.sent_away_bytes = talk.sent_away_bytes;
  facts.waited_for_s = talk.waited_for_s;
  facts.read_ahead_bytes = engine_->read_ahead_bytes();
  facts.kept_record_bytes = engine_->kept_record_bytes();
  facts.store_bytes = stored_bytes(options_.store_directories);
  facts.device = device_->account();
  facts.host = engine_->host_account();
  return facts;
}

void TrainRun::finish_interrupted() {
  engine_->make_durable();
  console_.line(
      fmt::format("interrupted: generation {} of {} steps is durable in {}; the same command goes "
                  "on from there",
                  engine_->durable_generation(), options_.steps, options_.store));
  RunReport report =
      make_report(facts(), log_, CounterSnapshot::of(runtime_->metrics) - at_first_step_);
  report.durable_generation = engine_->durable_generation();
  if (json_) json_->finish(to_json(report));
  ranks_->part();
}

void TrainRun::finish_done() {
  const double begin = now_s();
  engine_->make_durable();
  const double durable = now_s();
  RunReport report =
      make_report(facts(), log_, CounterSnapshot::of(runtime_->metrics) - at_first_step_);
  report.finish_s = durable - begin;
  report.held_out_loss = held_out_loss();
  engine_->make_durable();  // nothing that other ranks wait for is left under way
  report.durable_generation = engine_->durable_generation();
  for (const std::string& line : table(report)) console_.line(line);
  console_.line(
      fmt::format("generation {} is durable in {}; more --steps go on from there, `ziggurat sample "
                  "--store {}` speaks",
                  report.durable_generation, options_.store, options_.store));
  if (json_) json_->finish(to_json(report));
  ranks_->part();
}

int TrainRun::run() {
  Interrupt interrupt(Interrupt::Mode::kExit);
  open();
  if (!options_.json_path.empty() && ranks_->first()) {
    const nlohmann::json run{{"model", gpt::make_spec(options_.model).name},
                             {"dtype", to_string(options_.model.dtype)},
                             {"settings", settings_},
                             {"optimizer", to_string(options_.optimizer.state.optimizer)},
                             {"state_format", to_string(options_.optimizer.state.format)},
                             {"tokens_per_step", tokens_per_step()},
                             {"ranks", ranks_->count()},
                             {"resumed_at", engine_->generation()},
                             {"description", engine_->description()}};
    json_ = std::make_unique<JsonReport>(options_.json_path, run);
  }
  interrupt.set_mode(Interrupt::Mode::kFinish);
  at_first_step_ = CounterSnapshot::of(runtime_->metrics);
  while (engine_->generation() < options_.steps) {
    StepRecord record = step(interrupt.requested());
    if (options_.eval_every > 0 && record.step % options_.eval_every == 0 && !record.skipped)
      record.held_out_loss = held_out_loss();
    log_.add(record);
    if (json_) json_->add_step(to_json(record));
    show(record);
    if (interrupted_ || (ranks_->count() == 1 && interrupt.requested())) {
      finish_interrupted();
      return kExitInterrupted;
    }
  }
  finish_done();
  return 0;
}

std::optional<std::string> TrainRun::safe() const {
  if (!engine_) return std::nullopt;
  return fmt::format("generation {} in {} is durable: the same command goes on from there",
                     engine_->durable_generation(), options_.store);
}

}  // namespace

int train(const TrainOptions& options) {
  TrainRun run(options);
  try {
    return run.run();
  } catch (const Error& error) {
    std::vector<std::string> lines = advice(error, options, run.threads());
    if (!lines.empty()) lines.insert(lines.begin(), "what helps most, in order:");
    if (const std::optional<std::string> safe = run.safe()) lines.push_back(*safe);
    throw AdvisedError(error, std::move(lines));
  }
}

}  // namespace ziggurat::cli
