// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_strategies.cc: reads the question, compares, and hands the answer on.
#include "integrations/cli/plan_strategies.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/plan/models/config_json.h"
#include "core/plan/strategies/training_json.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/plan_options.h"
#include "integrations/cli/train_options.h"

namespace ziggurat::cli {
namespace {

constexpr std::int64_t kUsualSequence = 4096;
constexpr IntegerRange kCounts{.min = 1, .max = 1'000'000};

constexpr std::string_view kUsed[] = {
    "model",     "machine",   "ranks",    "context",      "batch",       "accumulate",
    "tp",        "sp",        "strategy", "zero_stage",   "shard_group", "hpz",
    "placement", "lora_rank", "json",     "write_config", "nvme_path"};

/// Refuses flags that say something of our own trainer alone. A config file may have them.
void require_used(const Settings& settings) {
  for (const Setting& setting : plan_settings()) {
    const bool used = std::ranges::find(kUsed, setting.name) != std::end(kUsed);
    if (used || !settings.given(setting.name) || settings.origin(setting.name) != "flag") continue;
    throw UsageError(fmt::format(
        "{} is of our own trainer, but --machine compares the strategies of all: leave one of them "
        "away",
        settings.described(setting.name)));
  }
}

/// The layout that a config file or flags ask for; none if they ask for nothing.
std::optional<ParallelLayout> asked_layout(const Settings& settings, const TrainOptions& run,
                                           int ranks) {
  const bool asks = settings.given("zero_stage") || settings.given("strategy") ||
                    settings.given("placement") || settings.given("tp") || settings.given("hpz") ||
                    settings.given("shard_group");
  if (!asks) return std::nullopt;
  const int tp = run.engine.tensor_parallel;
  if (ranks % tp != 0)
    throw UsageError(fmt::format("--ranks {} cannot be divided by --tp {}", ranks, tp));
  ParallelLayout layout;
  try {
    layout = layout_of(resolve(run.engine.strategy, ranks / tp), run.engine.placement);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  layout.tp = tp;
  layout.sequence_parallel = run.shape.sequence_parallel;
  const Quantization& quantization = run.engine.quantization;
  layout.quantized = quantization.weights && quantization.gradients();
  // Without a placement the state lies where DDP has it, on the GPU.
  if (!settings.given("placement")) layout.params = layout.optimizer = Tier::kDevice;
  return layout;
}

/// Returns the flags that would ask for what is taken where nothing was asked.
std::string usual_flags(const Settings& settings, const Job& job) {
  std::string said;
  const auto taken = [&](std::string_view name, std::int64_t value) {
    if (!settings.given(name)) said += fmt::format(" --{} {}", name, value);
  };
  taken("ranks", job.gpus);
  taken("batch", job.micro_batch);
  taken("context", job.sequence);
  taken("accumulate", job.micro_batches);
  return said;
}

void write_config(const StrategiesCommand& command, const Comparison& comparison) {
  if (!comparison.best)
    throw Error(ErrorCode::kInvalidArgument, "nothing fits, so no config can be written");
  const DeepSpeedConfig config = deepspeed_config(command, comparison.verdicts[*comparison.best]);
  write_output(command.config_path, config.text);
  if (config.script_must.empty()) return;
  fmt::print(stderr, "{} fits only if the script does what a config cannot say:\n",
             command.config_path);
  for (const std::string& what : config.script_must) fmt::print(stderr, "  - {}\n", what);
}

}  // namespace

ParallelLayout layout_of(const Strategy& strategy, const Placement& placement) {
  ParallelLayout layout;
  layout.dp = strategy.dp;
  layout.stage = strategy.zero_stage;
  layout.shard_group = strategy.shard_group < strategy.dp ? strategy.shard_group : 0;
  layout.hpz = strategy.hpz;
  layout.keeps_gathered = strategy.keeps_params_to_backward;
  layout.params = placement.params;
  layout.optimizer = placement.optimizer;
  return layout;
}

StateRecipe recipe_of(const StateKind& state) {
  const double record = static_cast<double>(record_format(state).tile_bytes()) / kTileElements;
  StateRecipe recipe;
  recipe.master = std::min(4.0, record);
  recipe.moments = record - recipe.master;
  return recipe;
}

Job read_job(const Settings& settings, const TrainOptions& run) {
  Job job;
  try {
    job.machine = find_machine(settings.text("machine"));
    job.model = find_model(settings.text("model"));
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  job.gpus = settings.given("ranks") ? static_cast<int>(settings.integer("ranks", kCounts))
                                     : job.machine.gpus;
  job.sequence =
      settings.given("context")
          ? run.shape.context
          : std::min(kUsualSequence, job.model.context > 0 ? job.model.context : kUsualSequence);
  job.micro_batch = settings.given("batch") ? run.shape.batch : 1;
  job.micro_batches = run.shape.accumulate;
  return job;
}

StrategiesCommand read_strategies_plan(const Settings& settings) {
  require_used(settings);
  StrategiesCommand command;
  TrainOptions run;
  write_shared(settings, run);
  command.job = read_job(settings, run);
  Job& job = command.job;
  command.asks_fp32 = settings.given("dtype") && run.model.dtype == DType::kFloat32;
  job.lora.rank = settings.integer("lora_rank", {.min = 0, .max = 65'536});
  command.asked = asked_layout(settings, run, job.gpus);
  command.usual = usual_flags(settings, job);
  command.json_path = settings.text("json");
  command.config_path = settings.text("write_config");
  command.nvme_path = settings.text("nvme_path");
  return command;
}

int plan_strategies(const StrategiesCommand& command) {
  const Job& job = command.job;
  const Comparison comparison = compare(job, command.asked);
  if (!command.json_path.empty())
    write_output(command.json_path, comparison_json(job, comparison));
  else
    print_strategies(command, comparison);
  if (!command.config_path.empty()) write_config(command, comparison);
  return 0;
}

}  // namespace ziggurat::cli
