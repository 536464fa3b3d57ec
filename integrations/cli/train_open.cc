// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_open.cc: opens what a run of `ziggurat train` needs (data, ranks, device),
// and prints what the run will do before its first step.
#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/numerics/simd_target.h"
#include "base/topology/core_budget.h"
#include "collectives/rendezvous/rendezvous.h"
#include "core/engine/engine_settings.h"
#include "integrations/cli/flag_words.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/store_paths.h"
#include "integrations/cli/train_run.h"

namespace ziggurat::cli {

void TrainRun::open() {
  text_ = std::make_unique<gpt::Text>(gpt::Text::load(options_.data, options_.shape.context));
  connect();
  settings_ = changeable_settings(options_, threads());
  choose();
  device_ = HostDevice::create(runtime_->reactor, options_.device_bytes, runtime_->trace.get(),
                               &runtime_->metrics);
  announce();

  const double opening_at = now_s();
  open_engine();
  open_s_ = now_s() - opening_at;
  for (const std::string& line : engine_->description()) console_.line("  " + in_flags(line));
  if (options_.loss_scale.config) scaler_.emplace(*options_.loss_scale.config);
  if (engine_->resumed()) resume();
  if (scaler_) {
    console_.line(fmt::format("  the loss scale is {}{}", scaler_->scale(),
                              scaler_->dynamic() ? " for now, because it is dynamic" : ""));
  }
  trainer_ = std::make_unique<gpt::Trainer>(*engine_, *device_, *runtime_->workers, model_,
                                            options_.shape, tensor_ranks_.get());
}

/// Makes this rank's runtime, and connects it to the other ranks if a launcher started several.
void TrainRun::connect() {
  RankOptions world = rank_options();
  if (options_.collectives != Collectives::kAuto) world.collectives = options_.collectives;
  if (options_.nproc > 1 && world.world_size != options_.nproc) {
    throw UsageError(
        fmt::format("--nproc {} is wrong: {} says that there are {} ranks; give the same number, "
                    "or leave --nproc out under a launcher",
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
  model_ = options_.model;
  place_ = place_of(ranks_->rank(), ranks_->count(), options_.engine.tensor_parallel);
  if (place_.tensor_ranks() > 1) {
    tensor_ranks_ = std::make_unique<gpt::TensorRanks>(*runtime_, place_);
    model_.part = tensor_ranks_->part();
  }
  strategy_ = strategy_of(options_.engine, ranks_->count());
}

EngineConfig TrainRun::engine_config() {
  EngineConfig config = options_.engine;
  config.store = measured_store();
  TrainerNeed need = gpt::Trainer::need(model_, options_.shape, threads());
  config.trainer_device_bytes = need.device_bytes;
  config.trainer_held_units = std::move(need.held);
  const int per_node =
      config.ranks_per_node > 0 ? config.ranks_per_node : static_cast<int>(local_rank().count);
  config.ranks_per_node = std::max(1, per_node / place_.tensor_ranks());
  config.run_identity = RunIdentity{.model = options_.model,
                                    .data_hash = text_->hash(),
                                    .seed = options_.seed,
                                    .batch = options_.shape.batch,
                                    .accumulate = options_.shape.accumulate,
                                    .context = options_.shape.context}
                            .text();
  config.numerics_fingerprint = gpt::numerics_fingerprint();
  config.before_reshard = [this](const StateContent& content) {
    require_same_run(content, "--store " + options_.store);
  };
  config.progress = [this](const char* what, std::uint64_t done, std::uint64_t total) {
    console_.progress(what, done, total);
  };
  return config;
}

/// Returns the store's directories with what the machine profile knows of their drives. Several
/// directories share a new store in proportion to the speed of their drives, and each drive gets as
/// many bytes at once as it was measured to need.
std::vector<StoreDirectory> TrainRun::measured_store() {
  std::vector<StoreDirectory> store = options_.engine.store;
  const MachineProfile profile = read_default_profile().value_or(MachineProfile{});
  const bool known = apply_profile(store, profile);
  profiled_nvme_bytes_per_s_ = profiled_bytes_per_s(store, profile);
  if (!known && store.size() > 1)
    console_.line(
        "  a new store is shared equally by its directories, because the machine profile does not "
        "have the speeds of all of them (`ziggurat bench io --path DIR --path DIR2` measures "
        "them)");
  return store;
}

void TrainRun::announce() {
  const ModelSpec spec = gpt::make_spec(model_.whole());
  console_.line(fmt::format(
      "{} has {:.1f} M parameters in {} and {} of training state; it learns from {} of text in {}",
      spec.name, static_cast<double>(spec.count()) / 1e6, to_string(spec.dtype),
      format_bytes(training_state_bytes(options_)), format_bytes(text_->size_bytes()),
      options_.data));
  if (place_.tensor_ranks() > 1) {
    console_.line(
        fmt::format("  {} data-parallel x {} tensor-parallel ranks{}, ZeRO stage {}: each rank has "
                    "these budgets and takes part in {} micro-batches of a step",
                    place_.data_ranks(), place_.tensor_ranks(),
                    options_.shape.sequence_parallel ? " (with sequence parallelism)" : "",
                    strategy_.zero_stage, options_.shape.accumulate));
  } else if (ranks_->count() > 1) {
    console_.line(fmt::format(
        "  {} ranks in ZeRO stage {} have these budgets each, and {} micro-batches of a step",
        ranks_->count(), strategy_.zero_stage, options_.shape.accumulate));
    console_.line("  ranks talk through " + runtime_->ranks->description());
  }
  console_.line(
      fmt::format("  placement {}; device budget {}, host budget {}; {} workers, optimizer in {}",
                  to_string(options_.engine.placement), format_bytes(options_.device_bytes),
                  format_bytes(options_.engine.host_budget_bytes), threads(), simd_target()));
  const bool fresh = options_.engine.resume == EngineConfig::Resume::kNever ||
                     !store_exists(options_.engine.store);
  if (!fresh) return;  // what the other steps write is known once the store is open
  const WritePlan plan = writes();
  console_.line(fmt::format(
      "  the run will write {} to {}: {} to make the store, {} in each of {} steps{}; {}",
      gigabytes(plan.first_bytes + plan.per_step_bytes * options_.steps + plan.at_end_bytes),
      options_.store, gigabytes(plan.first_bytes), gigabytes(plan.per_step_bytes), options_.steps,
      plan.at_end_bytes > 0 ? fmt::format(", {} at the end", gigabytes(plan.at_end_bytes)) : "",
      free_space(options_.engine.store)));
}

void TrainRun::resume() {
  const std::uint64_t generation = engine_->generation();
  if (!engine_->resumed_blob().empty()) {
    const RunState before = RunState::decode(engine_->resumed_blob());
    if (before.steps_done != generation) {
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format(
              "--store {}: generation {} holds the trainer's state of another step, {}; restore "
              "the store from a copy or a checkpoint, or begin a new run with --resume never",
              options_.store, generation, before.steps_done));
    }
    attempts_ = before.attempts;
    if (before.best && (!best_ || before.best->value < best_->value)) best_ = before.best;
    if (scaler_ && before.loss_scale)
      scaler_.emplace(*options_.loss_scale.config, *before.loss_scale);
    for (const std::string& line : differences(before.settings, settings_))
      console_.line("  changed: " + line);
  }
  const WritePlan plan = writes();
  const std::uint64_t left = options_.steps - std::min(options_.steps, generation);
  console_.line(fmt::format(
      "the run resumed at step {} of {}; the remaining steps will write {}; {}", generation,
      options_.steps, gigabytes(plan.per_step_bytes * left + (left > 0 ? plan.at_end_bytes : 0)),
      free_space(options_.engine.store)));
}

}  // namespace ziggurat::cli
