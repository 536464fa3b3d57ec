// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_options.cc: the table of the settings of `plan`, and the check of their
// values.
#include "integrations/cli/plan_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/topology/core_budget.h"
#include "base/topology/limits.h"
#include "core/plan/machines/machine.h"
#include "core/plan/models/named_models.h"
#include "integrations/cli/memory_advice.h"
#include "integrations/cli/train_options.h"
#include "integrations/gpt/tensor_traffic.h"

namespace ziggurat::cli {
namespace {

constexpr double kCountMin = 1e3;
constexpr double kCountMax = 1e15;
constexpr std::int64_t kRanksMax = 1'000'000;

struct Preset {
  const char* name;
  std::int64_t layers, width, heads, context;
};

/// Published shapes of models, with GPT-2's vocabulary of 50,257 (Radford et al. 2019; Brown et al.
/// 2020, table 2.1). gpt2-small and gpt2-medium are shapes of the reference trainer, whose
/// vocabulary is bytes.
constexpr Preset kPresets[] = {{"gpt2-xl", 48, 1600, 25, 1024},
                               {"gpt3-6.7b", 32, 4096, 32, 2048},
                               {"gpt3-13b", 40, 5120, 40, 2048},
                               {"gpt3-175b", 96, 12288, 96, 2048}};

std::string preset_names() {
  std::string names = "gpt2-small, gpt2-medium";
  for (const Preset& preset : kPresets) names += fmt::format(", {}", preset.name);
  return names;
}

/// The settings that `plan` shares with `train`, with the same meaning.
constexpr std::string_view kOfTrain[] = {"strategy",
                                         "shard_group",
                                         "hpz",
                                         "tp",
                                         "sp",
                                         "batch",
                                         "context",
                                         "accumulate",
                                         "activation_checkpointing",
                                         "quantized_weights",
                                         "dtype",
                                         "quantized_gradients",
                                         "reduce_bucket_size",
                                         "reduce_dtype",
                                         "optimizer",
                                         "state_format",
                                         "placement",
                                         "slots",
                                         "checkpoint_dir",
                                         "device_memory",
                                         "host_memory",
                                         "threads",
                                         "zero_stage"};

std::vector<SettingOf<TrainOptions>> shared_table() {
  std::vector<SettingOf<TrainOptions>> table = settings_of_train(kOfTrain);
  for (SettingOf<TrainOptions>& setting : table) {
    if (setting.name == "checkpoint_dir")
      setting.help =
          "directory to which the run would write checkpoints; host memory is set aside for them";
    const bool stage = setting.name == "zero_stage";
    if (!stage && !setting.name.ends_with("_memory")) continue;
    setting.default_text.clear();
    setting.help +=
        stage ? "; if neither this nor a strategy is given, all stages are shown side by side"
              : " of a rank; if not given, as much as the rank can use well";
  }
  return table;
}

std::optional<gpt::ModelConfig> preset(const std::string& name) {
  for (const Preset& preset : kPresets) {
    if (name != preset.name) continue;
    return gpt::ModelConfig{.layers = preset.layers,
                            .width = preset.width,
                            .heads = preset.heads,
                            .vocabulary = 50'257,
                            .context_max = preset.context};
  }
  return std::nullopt;
}

PlannedModel read_model(const Settings& settings, int tp) {
  PlannedModel model{
      .name = settings.text("model"), .config = preset(settings.text("model")), .size = {}};
  if (const auto count = parse_count(model.name)) {
    if (!(*count >= kCountMin && *count <= kCountMax)) {
      throw UsageError(fmt::format(
          "{} is a count of {:g} parameters, but must be between {:g} and {:g}, like 7B",
          settings.described("model"), *count, kCountMin, kCountMax));
    }
    model.size = model_size(static_cast<std::uint64_t>(std::llround(*count)), tp);
    return model;
  }
  // A published model that is not of the reference trainer's kind is planned by its count.
  if (const auto published = model.config ? std::nullopt : named_model(model.name)) {
    const auto count = static_cast<std::uint64_t>(count_parameters(*published).total);
    model.size = model_size(count, tp);
    return model;
  }
  if (!model.config) {
    try {
      model.config = gpt::parse_model(model.name);
    } catch (const Error&) {
      throw UsageError(
          fmt::format("{} is not a known model; give a parameter count like 7B, LAYERSxWIDTHxHEADS "
                      "like 32x4096x32, or one of {}",
                      settings.described("model"), preset_names()));
    }
  }
  model.size = model_size(gpt::make_spec(*model.config), tp);
  return model;
}

Recipe recipe_of(const Settings& settings, const TrainOptions& run) {
  Recipe recipe;
  recipe.dtype = run.model.dtype;
  recipe.reduce_dtype = run.engine.reduce_dtype.value_or(recipe.dtype);
  recipe.state = run.engine.optimizer.state;
  read_with(settings, "state_format", [&](const std::string&) {
    require_compatible(recipe.state.format, Rounding::kNearest, recipe.dtype == DType::kBFloat16);
  });
  return recipe;
}

int read_int(const Settings& settings, const std::string& key, std::int64_t min, std::int64_t max) {
  return static_cast<int>(settings.integer(key, {.min = min, .max = max}));
}

/// Returns the strategy that was asked for, or all stages side by side.
std::vector<Strategy> read_strategies(const StrategyRequest& request, int dp) {
  const bool asked =
      request.zero_stage || request.name || request.shard_group > 0 || request.hpz > 0;
  try {
    if (asked || dp == 1) return {resolve(request, dp)};
    std::vector<Strategy> stages;
    for (int stage = 0; stage <= 3; ++stage) stages.push_back(resolve({.zero_stage = stage}, dp));
    return stages;
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

void check_exchanges(const PlanCommand& command) {
  const Quantization& quantization = command.quantization;
  if (!quantization.any()) return;
  if (command.strategies.size() > 1) {
    throw UsageError(
        "--quantized-weights and --quantized-gradients can be planned for one stage only; give "
        "--zero-stage 3");
  }
  try {
    static_cast<void>(step_traffic(traffic_request(command, command.strategies[0], quantization)));
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

/// Returns the number of workers that a rank would have if its node were this machine.
std::size_t workers_of_a_rank(const WorldSize& world) {
  const LocalRank first{
      .rank = 0, .count = static_cast<std::size_t>(world.ranks_per_node), .source = {}};
  return core_budget(Topology::discover(), first, cgroup_cpus()).workers;
}

}  // namespace

TrafficRequest traffic_request(const PlanCommand& command, const Strategy& strategy,
                               const Quantization& quantization) {
  TrafficRequest request{
      .model = command.model.size,
      .recipe = command.recipe,
      .strategy = strategy,
      .quantization = quantization,
      .dp_ranks_per_node = std::max(1, command.world.ranks_per_node / command.mesh.tp),
      .tensor_ranks_per_node = std::min(command.mesh.tp, command.world.ranks_per_node)};
  if (command.model.config) {
    gpt::ModelConfig part = *command.model.config;
    part.part.ranks = command.mesh.tp;
    const gpt::TensorTraffic sent = gpt::tensor_traffic(part, command.shape);
    request.tensor = {.forward = sent.forward_bytes,
                      .again = sent.again_bytes,
                      .backward = sent.backward_bytes,
                      .shared_gradients = sent.shared_gradient_bytes};
  }
  return request;
}

std::span<const Setting> plan_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table = [] {
    std::vector<Setting> all{
        {"model", kText, "gpt2-small", "NAME",
         "a parameter count (7B), LAYERSxWIDTHxHEADS, or " + preset_names() +
             "; with --machine a published model such as llama-3-8b, or the path of a config.json"},
        {"machine", kText, "", "NAME|FILE",
         "compare the strategies of DDP, FSDP, DeepSpeed, Megatron and Ziggurat on this machine: " +
             machine_names() +
             ", or a JSON file; or `this`, whose cores and drives `ziggurat profile --measure` "
             "measures"},
        {"lora_rank", kInteger, "0", "R",
         "with --machine: train LoRA of this rank on all linear layers"},
        {"write_config", kText, "", "FILE",
         "with --machine: write what is recommended as a config for DeepSpeed and `ziggurat "
         "train`"},
        {"nvme_path", kText, "", "DIR",
         "with --write-config: the folder that the config names for state on NVMe"},
        {"ranks", kInteger, "1", "N", "number of ranks in the whole job"},
        {"ranks_per_node", kInteger, "8", "P", "number of ranks on one machine"}};
    for (const Setting& setting : shared_table()) all.push_back(setting);
    all.push_back({"memory", kSwitch, "false", "", "show only the bytes that each rank holds"});
    all.push_back({"traffic", kSwitch, "false", "", "show only the bytes that each rank sends"});
    all.push_back({"json", kText, "", "FILE", "write everything to FILE as JSON, in bytes"});
    return all;
  }();
  return table;
}

std::vector<SettingOf<TrainOptions>> settings_of_train(std::span<const std::string_view> names) {
  std::vector<SettingOf<TrainOptions>> table;
  for (const SettingOf<TrainOptions>& setting : train_table()) {
    if (std::ranges::find(names, setting.name) != names.end()) table.push_back(setting);
  }
  return table;
}

void write_shared(const Settings& settings, TrainOptions& run) {
  settings.write_to(run, shared_table());
}

PlanCommand read_plan(const Settings& settings) {
  for (const char* const name : {"lora_rank", "write_config", "nvme_path"}) {
    if (settings.given(name))
      throw UsageError(fmt::format("{} needs --machine", settings.described(name)));
  }
  PlanCommand command;
  TrainOptions run;
  write_shared(settings, run);
  const int ranks = read_int(settings, "ranks", 1, kRanksMax);
  const int per_node = read_int(settings, "ranks_per_node", 1, kRanksMax);
  command.world = {.ranks = ranks, .ranks_per_node = std::min(ranks, per_node)};
  const int tp = run.engine.tensor_parallel;
  try {
    command.mesh = with_dp_of_world({.tp = tp}, ranks);
    command.warning = Mesh(command.mesh, command.world).warning();
  } catch (const Error& error) {
    throw UsageError(fmt::format("--ranks {} --tp {}: {}", ranks, tp, error.what()));
  }
  command.model = read_model(settings, tp);
  command.recipe = recipe_of(settings, run);
  if (command.model.config) command.model.config->dtype = command.recipe.dtype;
  command.placement = run.engine.placement;
  command.slots = run.engine.slots;
  command.reduce_bucket_count = run.engine.reduce_bucket_elements;
  command.strategies = read_strategies(run.engine.strategy, command.mesh.dp);
  command.accumulate = static_cast<int>(run.shape.accumulate);
  command.shape = run.shape;
  if (command.shape.sequence_parallel && tp == 1)
    throw UsageError("--sp divides rows among tensor-parallel ranks; give --tp too");
  command.quantization = run.engine.quantization;
  check_exchanges(command);
  command.memory = settings.on("memory") || !settings.on("traffic");
  command.traffic = settings.on("traffic") || !settings.on("memory");
  if (command.model.config) {
    // A published vocabulary (50,257) is padded until the ranks can divide it, as Megatron-LM does.
    run.model = *command.model.config;
    run.model.vocabulary = (run.model.vocabulary + tp - 1) / tp * tp;
  }
  if (!settings.given("device_memory")) run.device_bytes = 0;
  if (!settings.given("host_memory")) run.engine.host_budget_bytes = 0;
  run.engine.ranks_per_node = command.world.ranks_per_node;
  run.engine.checkpoint.saves = !run.checkpoint.directory.empty();
  if (run.threads == 0) run.threads = workers_of_a_rank(command.world);
  command.run = std::move(run);
  command.json_path = settings.text("json");
  return command;
}

}  // namespace ziggurat::cli
