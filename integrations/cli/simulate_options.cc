// SPDX-License-Identifier: Apache-2.0
// integrations/cli/simulate_options.cc: the table of the settings of `simulate`, and what they make
// of a model and a machine.
#include "integrations/cli/simulate_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "core/engine/engine_config.h"
#include "core/engine/engine_settings.h"
#include "core/plan/auto_placement.h"
#include "core/plan/models/model_units.h"
#include "core/rehearsal/rehearsed_training.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/plan_options.h"
#include "integrations/cli/plan_strategies.h"
#include "integrations/cli/train_options.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat::cli {
namespace {

constexpr IntegerRange kStepsToPlay{.min = 1, .max = 10'000};
constexpr IntegerRange kSeeds{.min = 1, .max = std::int64_t{1} << 62};
/// The most chunks that all ranks have together if each rank is played without being asked for.
constexpr std::uint64_t kChunksOfAllRanks = 20'000;
constexpr std::array<std::string_view, 3> kPlays{"auto", "all", "one"};

/// The settings that `simulate` shares with `train`, with the same meaning.
constexpr std::string_view kSharedWithTrain[] = {"batch",
                                                 "context",
                                                 "accumulate",
                                                 "activation_checkpointing",
                                                 "dtype",
                                                 "zero_stage",
                                                 "strategy",
                                                 "shard_group",
                                                 "hpz",
                                                 "placement",
                                                 "device_memory",
                                                 "host_memory",
                                                 "threads",
                                                 "optimizer",
                                                 "state_format",
                                                 "clip",
                                                 "speculate",
                                                 "prefetch_bucket_size",
                                                 "max_live_parameters",
                                                 "max_reuse_distance",
                                                 "param_persistence_threshold",
                                                 "reduce_bucket_size",
                                                 "reduce_dtype",
                                                 "slots",
                                                 "durable_every",
                                                 "durable_every_steps",
                                                 "collectives"};

/// What this command does by itself where the setting is not given.
struct Otherwise {
  std::string_view name;
  const char* help;
};
constexpr Otherwise kOtherwise[] = {
    {"batch", "; default: 1"},
    {"context", "; default: 4096, or the model's longest if that is less"},
    {"accumulate", "; default: 1"},
    {"device_memory", " of a rank; default: that of the machine's GPU"},
    {"host_memory", " of a rank; default: its share of the node's"},
    {"threads", "; default: 8, or an equal part of the threads of `this` machine"},
    {"collectives", "; here mpi is as tcp"}};

std::vector<SettingOf<TrainOptions>> simulated_table() {
  std::vector<SettingOf<TrainOptions>> table = settings_of_train(kSharedWithTrain);
  for (SettingOf<TrainOptions>& setting : table) {
    const auto* const its = std::ranges::find(kOtherwise, setting.name, &Otherwise::name);
    if (its == std::end(kOtherwise)) continue;
    setting.default_text.clear();
    setting.help += its->help;
  }
  return table;
}

void make_budgets(const Settings& settings, const Machine& machine, int in_node,
                  TrainOptions& run) {
  if (run.device_bytes == 0 || !settings.given("device_memory")) {
    const double left = machine.device_bytes - kContextBytes - kCommunicatorBytes;
    run.device_bytes =
        static_cast<std::uint64_t>(std::max(left, 0.0)) / kHugePageBytes * kHugePageBytes;
  }
  if (run.engine.host_budget_bytes > 0 && settings.given("host_memory")) return;
  const auto share = static_cast<std::uint64_t>(machine.host_bytes * kHostShare / in_node);
  run.engine.host_budget_bytes = share / kHugePageBytes * kHugePageBytes;
}

RunRequest run_request(const RehearsalRequest& request, const Strategy& strategy) {
  const EngineConfig& config = request.config;
  const bool reachable = request.machine.device.host_accessible;
  return {.model = request.model,
          .state = config.optimizer.state,
          .sharding = Sharding::of(strategy, 0),
          .placement = config.placement,
          .reduction = {.dtype = config.reduce_dtype,
                        .bucket_elements = config.reduce_bucket_elements,
                        .staged = !reachable},
          .device = {.trainer = {.device_bytes = config.trainer_device_bytes,
                                 .held = config.trainer_held_units},
                     .keep_gathered = strategy.keeps_params_to_backward,
                     .out_of_reach = !reachable},
          .slots = config.slots,
          .budgets = {request.machine.device.memory_bytes, config.host_budget_bytes},
          .outstanding_bytes = most_outstanding_bytes(config.store)};
}

bool plays_one(const Settings& settings, const SimulateCommand& command) {
  const std::string play = settings.choice("play", kPlays);
  const auto ranks = static_cast<std::uint64_t>(command.job.gpus);
  if (command.faults && play == "one")
    throw UsageError("--play one and --faults: faults strike single ranks; give --play all");
  if (ranks == 1 || play == "all" || command.faults) return false;
  if (play == "auto" && ranks * command.plan.chunk_count <= kChunksOfAllRanks) return false;
  const auto in_node = static_cast<std::uint64_t>(command.request.machine.network.ranks_per_node);
  if (ranks % in_node == 0) return true;
  throw UsageError(
      fmt::format("--ranks {}: one rank can be played for all only where every node is full; give "
                  "a multiple of {}, or --play all, which takes long",
                  ranks, in_node));
}

void make_request(const Settings& settings, TrainOptions& run, SimulateCommand& command) {
  const Machine& machine = command.job.machine;
  RehearsalRequest& request = command.request;
  const int ranks = command.job.gpus;
  make_budgets(settings, machine, std::min(machine.gpus, ranks), run);
  request.model = model_units(command.job.model, run.model.dtype);
  request.config = run.engine;
  request.config.store = {{"store"}};
  const bool in_16_bits = size_bytes(run.model.dtype) == 2;
  request.config.trainer_device_bytes = trainer_bytes(command.training) * (in_16_bits ? 1 : 2);
  request.config.trainer_held_units = held_units(command.job.model);
  request.machine = rehearsed_machine(
      machine, {.ranks = ranks,
                .threads = settings.given("threads") ? static_cast<int>(run.threads) : 0,
                .nccl = run.collectives == Collectives::kNccl,
                .device_bytes = run.device_bytes});
  command.computing = in_16_bits ? machine : in_fp32(machine);
  request.costs = unit_costs(command.training, command.computing);
  request.steps = static_cast<int>(settings.integer("steps", kStepsToPlay));
  request.trace_path = settings.text("trace");
}

}  // namespace

std::span<const Setting> simulate_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table = [] {
    std::vector<Setting> all{
        {"model", kText, "llama-3-8b", "NAME",
         "a published model such as llama-3-8b, the path of a config.json, or LAYERSxWIDTHxHEADS"},
        {"machine", kText, "h100x8", "NAME|FILE",
         "one of " + machine_names() + ", or a JSON file, as for `plan --machine`"},
        {"ranks", kInteger, "", "N",
         "number of ranks in the whole job, each with a GPU; default: the GPUs of one machine"},
        {"steps", kInteger, "3", "N",
         "steps to play; the first waits for no earlier one, and the last one's update has no step "
         "beside it"},
        {"play", kText, "auto", "auto|all|one",
         "all: every rank is played; one: one rank is, the others do the same at the same time, "
         "and what they send is counted by closed forms; auto: one if all would take long"}};
    for (const Setting& setting : simulated_table()) all.push_back(setting);
    all.push_back({"trace", kText, "", "FILE",
                   "write a trace of rank 0 in virtual time (Chrome format, for ui.perfetto.dev)"});
    all.push_back(
        {"json", kText, "", "FILE", "write everything to FILE as JSON, in bytes and seconds"});
    all.push_back({"faults", kInteger, "", "SEED",
                   "play the run a second time while drives, ranks and messages are slow, fail or "
                   "lose power, as this seed draws it, then open what is left, and check what must "
                   "hold; plays all ranks"});
    return all;
  }();
  return table;
}

SimulateCommand read_simulate(const Settings& settings) {
  SimulateCommand command;
  TrainOptions run;
  run.shape.accumulate = 1;
  settings.write_to(run, simulated_table());
  command.job = read_job(settings, run);
  Machine& machine = command.job.machine;
  if (machine.one_memory && command.job.gpus > machine.gpus)
    machine = shared_by(machine, command.job.gpus);
  if (machine.one_memory && run.threads > 0 && settings.given("threads"))
    machine = with_threads(machine, static_cast<int>(run.threads));
  command.job.recipe = recipe_of(run.engine.optimizer.state);
  command.json_path = settings.text("json");
  try {
    command.strategy = strategy_of(run.engine, command.job.gpus);
    command.training = training_of(command.job, System::kZiggurat, layout_of(command.strategy, {}));
    const bool again = run.shape.checkpointing == gpt::ActivationCheckpointing::kBlock;
    command.training.recompute = again ? Recompute::kFull : Recompute::kNothing;
    Software& software = command.training.software;
    software.vertical = software.leaves_out_last = true;
    software.direct = run.collectives != Collectives::kNccl;
    make_request(settings, run, command);
  } catch (const MemoryExhausted&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  Placement& placement = command.request.config.placement;
  RunRequest planned = run_request(command.request, command.strategy);
  if (placement.automatic) {
    PlacementChoice choice = choose_placement(planned);
    placement = planned.placement = choice.placement;
    command.chosen = std::move(choice.why);
  }
  command.training.layout = layout_of(command.strategy, placement);
  command.plan = plan_run(planned);
  if (settings.given("faults")) {
    command.faults = static_cast<std::uint64_t>(settings.integer("faults", kSeeds));
    if (!command.request.trace_path.empty() || !command.json_path.empty())
      throw UsageError("--faults writes neither --trace nor --json; leave them away");
  }
  command.request.mirrored = plays_one(settings, command);
  require_writable(command.json_path);
  return command;
}

}  // namespace ziggurat::cli
