// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_auto.cc: makes the question to core/plan of a run's options, and words of
// the answer.
#include "integrations/cli/train_auto.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/topology/core_budget.h"
#include "base/topology/limits.h"
#include "core/plan/models/named_models.h"
#include "integrations/cli/flag_words.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/plan_strategies.h"
#include "integrations/cli/store_paths.h"
#include "integrations/cli/train_run.h"

namespace ziggurat::cli {
namespace {

/// Steps after which the planned figures are compared: the first ones learn the order of units.
constexpr std::size_t kComparedAfter = 4;

ModelShape shape_of(const gpt::ModelConfig& model) {
  return ModelShape::gpt(model.layers, model.width, model.heads, model.vocabulary,
                         model.context_max);
}

}  // namespace

bool leaves_memory(const TrainOptions& options) {
  return options.device_bytes == 0 || options.engine.host_budget_bytes == 0;
}

TrainChoice choose_memory(TrainOptions& options, std::size_t threads, const Strategy& strategy,
                          const AutoFacts& facts) {
  RunChoice its = choose_run(
      run_request(options, threads, strategy),
      {.free_bytes = facts.free_bytes, .node_ranks = facts.node_ranks, .share = kCountedShare},
      facts.speeds);
  EngineConfig& engine = options.engine;
  engine.placement = its.choice.placement;
  options.device_bytes = its.choice.units_bytes;
  engine.host_budget_bytes = its.choice.host_bytes;
  return {.planned = {.device_bytes = its.plan.device.peak_bytes(),
                      .host_bytes = its.plan.host_peak_bytes(),
                      .store_bytes = its.plan.store_bytes,
                      .drive_bytes = its.choice.drive_bytes},
          .why = std::move(its.why)};
}

std::optional<double> planned_seconds(const TrainOptions& options, std::size_t threads,
                                      const Strategy& strategy, const MachineProfile& profile) {
  if (!profile.compute || strategy.dp > 1 || options.engine.tensor_parallel > 1)
    return std::nullopt;
  try {
    Job job;
    job.model = shape_of(options.model);
    job.machine = with_threads(machine_of_profile(profile, {}), static_cast<int>(threads));
    if (size_bytes(options.model.dtype) > 2) job.machine = in_fp32(job.machine);
    job.sequence = options.shape.context;
    job.micro_batch = options.shape.batch;
    job.micro_batches = options.shape.accumulate;
    job.recipe = recipe_of(options.engine.optimizer.state);
    Training training =
        training_of(job, System::kZiggurat, layout_of(strategy, options.engine.placement));
    const bool again = options.shape.checkpointing == gpt::ActivationCheckpointing::kBlock;
    training.recompute = again ? Recompute::kFull : Recompute::kNothing;
    training.software.vertical = training.software.leaves_out_last = true;
    return step_time(training, job.machine).seconds;
  } catch (const Error&) {
    return std::nullopt;  // a profile without some rate
  }
}

std::string beside(const AutoFigures& planned, const AutoFigures& taken, std::uint64_t step) {
  const auto sizes = [](const AutoFigures& its) {
    return fmt::format("{} on the device, {} on the host, {} in the store and {} a step over NVMe",
                       format_bytes(its.device_bytes), format_bytes(its.host_bytes),
                       format_bytes(its.store_bytes), format_bytes(its.drive_bytes));
  };
  const std::string seconds =
      planned.step_s > 0 ? fmt::format(", in {:.3f} s", planned.step_s) : "";
  return fmt::format("auto planned {}{}; step {} had {}, in {:.3f} s", sizes(planned), seconds,
                     step, sizes(taken), taken.step_s);
}

/// Lets core/plan choose what the run leaves out, with the same facts on all ranks.
void TrainRun::choose() {
  if (!leaves_memory(options_)) return;
  std::vector<StoreDirectory>& store = options_.engine.store;  // as the engine is going to have it
  const MachineProfile profile = read_default_profile().value_or(MachineProfile{});
  apply_profile(store, profile);
  struct Found {
    std::uint64_t free_bytes;
    std::uint64_t node_ranks;
    MovingSpeeds speeds;
  };
  const std::vector<Found> all =
      ranks_->all(Found{.free_bytes = free_memory_bytes(),
                        .node_ranks = local_rank().count,
                        .speeds = MovingSpeeds::of(profile, profiled_bytes_per_s(store, profile))});
  AutoFacts facts{.free_bytes = std::ranges::min(all, {}, &Found::free_bytes).free_bytes,
                  .node_ranks = std::ranges::max(all, {}, &Found::node_ranks).node_ranks,
                  .speeds = all.front().speeds};
  chosen_ = choose_memory(options_, threads(), strategy_, facts);
  if (profile.cpu_model == runtime_->topology.cpu_model)
    chosen_->planned.step_s = planned_seconds(options_, threads(), strategy_, profile).value_or(0);
  console_.line("  " + in_flags(chosen_->why));
}

/// Says once what was planned beside what the newest step took.
void TrainRun::compare_with_plan(const StepRecord& record) {
  if (!chosen_ || compared_ || record.skipped || log_.steps() < kComparedAfter) return;
  compared_ = true;
  const auto ranks = static_cast<std::uint64_t>(ranks_->count());
  const AutoFigures taken{.device_bytes = device_->account().peak_bytes(),
                          .host_bytes = engine_->host_account().peak_bytes(),
                          .store_bytes = stored_bytes(options_.engine.store) / ranks,
                          .drive_bytes = record.counters[Counter::kNvmeReadBytes] +
                                         record.counters[Counter::kNvmeWriteBytes],
                          .step_s = record.wall_s};
  console_.line("  " + beside(chosen_->planned, taken, record.step));
}

}  // namespace ziggurat::cli
