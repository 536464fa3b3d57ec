// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_options.cc: the table of `plan`, and what each setting may be.
#include "integrations/cli/plan_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "core/sharding/placement.h"
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

/// Published shapes, with GPT-2's vocabulary of 50,257 (Radford et al. 2019; Brown et al. 2020,
/// table 2.1). gpt2-small and gpt2-medium are the reference trainer's, whose vocabulary is bytes.
constexpr Preset kPresets[] = {{"gpt2-xl", 48, 1600, 25, 1024},
                               {"gpt3-6.7b", 32, 4096, 32, 2048},
                               {"gpt3-13b", 40, 5120, 40, 2048},
                               {"gpt3-175b", 96, 12288, 96, 2048}};

std::string preset_names() {
  std::string names = "gpt2-small, gpt2-medium";
  for (const Preset& preset : kPresets) names += fmt::format(", {}", preset.name);
  return names;
}

/// The entry of `train`, so that a flag means the same in both.
Setting of_train(std::string_view key) {
  const std::span<const Setting> table = train_settings();
  const auto found = std::ranges::find(table, key, &Setting::key);
  ZIGGURAT_CHECK(found != table.end(), "train has no setting '{}'", key);
  return *found;
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
      throw UsageError(fmt::format("{} is a count of {:g} parameters: give {:g} to {:g}, like 7B",
                                   settings.described("model"), *count, kCountMin, kCountMax));
    }
    model.size = model_size(static_cast<std::uint64_t>(std::llround(*count)), tp);
    return model;
  }
  if (!model.config) {
    try {
      model.config = gpt::parse_model(model.name);
    } catch (const Error&) {
      throw UsageError(
          fmt::format("{}: give a parameter count like 7B, LAYERSxWIDTHxHEADS like 32x4096x32, or "
                      "one of {}",
                      settings.described("model"), preset_names()));
    }
  }
  model.size = model_size(gpt::make_spec(*model.config), tp);
  return model;
}

Recipe read_recipe(const Settings& settings) {
  Recipe recipe;
  recipe.dtype = *parse_dtype(settings.choice("dtype", kDTypeNames));
  recipe.reduce_dtype = settings.given("reduce-dtype")
                            ? *parse_dtype(settings.choice("reduce-dtype", kDTypeNames))
                            : recipe.dtype;
  recipe.state = {*parse_optimizer(settings.choice("optimizer", optimizer_names())),
                  *parse_state_format(settings.choice("state-format", state_format_names()))};
  read_with(settings, "state-format", [&](const std::string&) {
    require_compatible(recipe.state.format, Rounding::kNearest, recipe.dtype == DType::kBFloat16);
  });
  return recipe;
}

int read_int(const Settings& settings, const std::string& key, std::int64_t min, std::int64_t max) {
  return static_cast<int>(settings.integer(key, {.min = min, .max = max}));
}

/// The one asked for, or all stages beside each other.
std::vector<Strategy> read_strategies(const Settings& settings, int dp) {
  const StrategyRequest request = strategy_request(settings);
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

Quantization read_exchanges(const Settings& settings, const PlanCommand& command) {
  const Quantization quantization = read_quantization(settings);
  if (!quantization.weights && quantization.gradient_bits == 16) return quantization;
  if (command.strategies.size() > 1) {
    throw UsageError(
        "--quantized-weights and --quantized-gradients are for one stage: give --zero-stage 3");
  }
  try {
    static_cast<void>(step_traffic(traffic_request(command, command.strategies[0], quantization)));
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  return quantization;
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
  static const std::vector<Setting> table{
      {"model", kText, "gpt2-small", "NAME",
       "a parameter count (7B), LAYERSxWIDTHxHEADS, or " + preset_names()},
      {"ranks", kInteger, "1", "N", "ranks of the whole job"},
      {"ranks-per-node", kInteger, "8", "P", "ranks on one machine"},
      {"zero-stage", kInteger, "", "0|1|2|3",
       "what a rank has a slice of: 0 nothing, 1 and 2 gradients and optimizer state, 3 parameters "
       "too; neither this nor a strategy: all of them, side by side"},
      of_train("strategy"),
      of_train("shard-group"),
      of_train("hpz"),
      {"tp", kInteger, "1", "T", "tensor-parallel ranks, which divide each layer"},
      of_train("sp"),
      of_train("batch"),
      of_train("context"),
      of_train("activation-checkpointing"),
      of_train("quantized-weights"),
      of_train("quantized-gradients"),
      of_train("accumulate"),
      of_train("reduce-bucket-size"),
      of_train("dtype"),
      of_train("reduce-dtype"),
      of_train("optimizer"),
      of_train("state-format"),
      of_train("placement"),
      of_train("slots"),
      {"memory", kSwitch, "false", "", "only bytes that are held"},
      {"traffic", kSwitch, "false", "", "only bytes that are sent"},
      {"json", kText, "", "FILE", "write everything to a file, in bytes"},
  };
  return table;
}

PlanCommand read_plan(const Settings& settings) {
  PlanCommand command;
  const int ranks = read_int(settings, "ranks", 1, kRanksMax);
  const int per_node = read_int(settings, "ranks-per-node", 1, kRanksMax);
  command.world = {.ranks = ranks, .ranks_per_node = std::min(ranks, per_node)};
  const int tp = read_int(settings, "tp", 1, kRanksMax);
  try {
    command.mesh = with_dp_of_world({.tp = tp}, ranks);
    command.warning = Mesh(command.mesh, command.world).warning();
  } catch (const Error& error) {
    throw UsageError(fmt::format("--ranks {} --tp {}: {}", ranks, tp, error.what()));
  }
  command.model = read_model(settings, tp);
  command.recipe = read_recipe(settings);
  if (command.model.config) command.model.config->dtype = command.recipe.dtype;
  command.placement = read_with(settings, "placement",
                                [](const std::string& text) { return parse_placement(text); });
  command.slots = read_int(settings, "slots", 1, 2);
  command.reduce_bucket_count =
      static_cast<std::uint64_t>(settings.integer("reduce-bucket-size", {.min = 1}));
  command.strategies = read_strategies(settings, command.mesh.dp);
  command.accumulate = read_int(settings, "accumulate", 1, 65'536);
  command.shape = read_run_shape(settings);
  if (command.shape.sequence_parallel && tp == 1)
    throw UsageError("--sp divides rows among tensor-parallel ranks: give --tp too");
  command.quantization = read_exchanges(settings, command);
  command.memory = settings.on("memory") || !settings.on("traffic");
  command.traffic = settings.on("traffic") || !settings.on("memory");
  command.json_path = settings.text("json");
  return command;
}

}  // namespace ziggurat::cli
