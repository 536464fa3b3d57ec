// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_settings.cc: the table, grouped by subject: the optimizer, the tiers of state,
// the ranks, and the store.
#include "core/engine/engine_settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "collectives/mesh.h"

namespace ziggurat {
namespace {

using In = SettingsIn<EngineConfig>;
using enum SettingKind;

constexpr IntegerRange kRanks{.min = 0, .max = 1 << 20};
constexpr IntegerRange kElements{.min = 1, .max = std::int64_t{1} << 50};
constexpr IntegerRange kElementsOrNone{.min = 0, .max = std::int64_t{1} << 50};
constexpr NumberRange kBeta{.min = 0, .max = 0.999999};

constexpr std::array<std::string_view, 3> kSpeculations{"auto", "never", "always"};
constexpr std::array<std::string_view, 4> kResumes{"auto", "never", "new", "reshard"};

/// Returns a help's text with the names that it is about.
std::string named(fmt::format_string<std::string> text, std::span<const std::string_view> names) {
  return fmt::format(text, fmt::format("{}", fmt::join(names, ", ")));
}

/// Returns the names of the state formats with what the help says of each.
std::string formats_text() {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < kStateFormatCount; ++i) {
    const FormatInfo its = info_of(static_cast<StateFormat>(i));
    texts.push_back(fmt::format("{}{}", its.name, its.about));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}
/// Returns the names of the formats that have a property.
std::string formats_text(bool (*have)(StateFormat), std::string_view between) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kStateFormatCount; ++i) {
    const auto format = static_cast<StateFormat>(i);
    if (have(format)) names.push_back(to_string(format));
  }
  return fmt::format("{}", fmt::join(names, between));
}

std::string dtype_text(DType dtype) { return std::string(to_string(dtype)); }
DType dtype_of(const std::string& text) {
  require_one_of(text, kDTypeNames);
  return *parse_dtype(text);
}

SettingOf<EngineConfig> betas() {
  return In::custom(
      "betas", kNumbers,
      [](const EngineConfig& config) -> SettingValue {
        return std::vector<double>{widened(config.optimizer.beta1),
                                   widened(config.optimizer.beta2)};
      },
      [](EngineConfig& config, const SettingValue& value) {
        const auto& numbers = std::get<std::vector<double>>(value);
        for (const double number : numbers) require_in(number, kBeta);
        require_length(numbers, 2);
        config.optimizer.beta1 = static_cast<float>(numbers[0]);
        config.optimizer.beta2 = static_cast<float>(numbers[1]);
      },
      {.values = "B1,B2",
       .help = named("the decays of the optimizer's moving averages; the first is {}'s momentum",
                     optimizers_that(&OptimizerInfo::has_momentum))});
}

/// The setting `rounding`, which commands had before there were two settings for it.
SettingOf<EngineConfig> both_roundings() {
  return In::custom(
      "rounding", kText,
      [](const EngineConfig& config) -> SettingValue {
        const OptimizerConfig& its = config.optimizer;
        if (!its.state_rounding || its.state_rounding != its.param_rounding) return {};
        return std::string(to_string(*its.state_rounding));
      },
      [](EngineConfig& config, const SettingValue& value) {
        const std::size_t word = require_one_of(std::get<std::string>(value), rounding_names());
        config.optimizer.state_rounding = static_cast<Rounding>(word);
        config.optimizer.param_rounding = config.optimizer.state_rounding;
      },
      {.values = "nearest|stochastic", .help = "sets both state_rounding and param_rounding"});
}

std::vector<SettingOf<EngineConfig>> optimizer_table() {
  return {
      In::word("optimizer", [](auto& c) -> auto& { return c.optimizer.state.optimizer; },
               optimizer_names(),
               {.values = "NAME",
                .help = named("{}", optimizer_names()),
                .at_resume = AtResume::kFixed}),
      In::word("state_format", [](auto& c) -> auto& { return c.optimizer.state.format; },
               state_format_names(),
               {.values = "NAME",
                .help = "how the optimizer's state is kept: " + formats_text(),
                .at_resume = AtResume::kFixed}),
      In::word("state_rounding", [](auto& c) -> auto& { return c.optimizer.state_rounding; },
               rounding_names(),
               {.values = "nearest|stochastic",
                .help = "rounding of moments and masters that are kept in bf16 (state formats " +
                        formats_text(rounds_state, " and ") +
                        "); fixed when a store is made; default: stochastic"}),
      In::word("param_rounding", [](auto& c) -> auto& { return c.optimizer.param_rounding; },
               rounding_names(),
               {.values = "nearest|stochastic",
                .help = "rounding of bf16 parameters from fp32 masters; fixed when a store is "
                        "made; default: nearest, which alone is allowed in " +
                        formats_text(has_residual, " and ")}),
      both_roundings(),
      betas(),
      In::number("eps", [](auto& c) -> auto& { return c.optimizer.eps; }, {.min = 0, .max = 1},
                 {.values = "X", .help = "small number that the optimizer adds to its divisor"}),
      In::number("weight_decay", [](auto& c) -> auto& { return c.optimizer.weight_decay; },
                 {.min = 0, .max = 100},
                 {.values = "X",
                  .help = named("decay of the weights, for matrices only; decoupled in {}, else "
                                "added to the gradient",
                                optimizers_that(&OptimizerInfo::decouples_decay))}),
      // The store's records have the value, so a new value at resume has no effect.
      In::number("initial_accumulator",
                 [](auto& c) -> auto& { return c.optimizer.initial_accumulator; },
                 {.min = 0, .max = 1e30},
                 {.values = "X",
                  .help = named("{}: first value of its sums of squares in a new store",
                                optimizers_that(&OptimizerInfo::has_initial_accumulator)),
                  .at_resume = AtResume::kSilent}),
      In::custom(
          "param_groups", kGroups,
          [](const EngineConfig& c) -> SettingValue { return to_text(c.param_groups); },
          [](EngineConfig& c, const SettingValue& value) {
            try {
              c.param_groups = parse_param_groups(std::get<std::string>(value));
            } catch (const std::exception& error) {
              complain_of_value(error);
            }
          },
          {.values = "PATTERN:KEY=X,..;..",
           .help = "parameters with an lr-scale, weight-decay, beta1, beta2 or eps of their own, "
                   "or frozen; a parameter is in the first group whose pattern (* and ?) matches "
                   "its name; names are those of the exported file"}),
      In::number("clip", &EngineConfig::clip_norm, {.min = 0, .max = 1e30},
                 {.values = "NORM",
                  .help = "largest global 2-norm of the gradient; 0 turns clipping off"}),
      In::word("speculate", &EngineConfig::speculation, kSpeculations,
               {.values = "auto|never|always",
                .help = "whether updates start before the gradient's norm is known: always, never, "
                        "or (auto) as long as this was mostly right"}),
  };
}

std::vector<SettingOf<EngineConfig>> memory_table() {
  return {
      In::size_or_auto("host_memory", &EngineConfig::host_budget_bytes, kMiB,
                       {.values = "SIZE|auto",
                        .help = "budget of pinned host memory; auto: chosen from the memory that "
                                "is free, with the placement if that is auto too",
                        .among_ranks = AmongRanks::kOwn}),
      // Ranks may place parameters and gradients differently. They must agree on the optimizer's
      // tier, because it decides how they make a step durable.
      In::parsed("placement", &EngineConfig::placement, parse_placement,
                 [](const Placement& placement) { return to_string(placement); },
                 {.values = "WHERE",
                  .help = "tier (device, host, nvme) of each class of state, or all=TIER; "
                          "optimizer=device:2GiB,host:8GiB,nvme divides its records; auto: chosen "
                          "from the budgets, or with them",
                  .agreed_text =
                      [](const EngineConfig& c) {
                        if (c.placement.automatic) return to_string(c.placement);
                        return std::string(to_string(c.placement.optimizer));
                      }}),
      In::integer("prefetch_bucket_size", &EngineConfig::prefetch_elements_max, kElementsOrNone,
                  {.values = "ELEMENTS",
                   .help = "the most parameters that are loaded, or in stage 3 gathered, ahead of "
                           "their use; at most two units, or from a drive as many as keep it busy "
                           "by the machine profile, up to eight"}),
      In::integer("max_live_parameters", &EngineConfig::max_live_parameters, kElementsOrNone,
                  {.values = "ELEMENTS",
                   .help = "the largest number of parameters on the device, including those loaded "
                           "ahead; units in use stay there even if they are more"}),
      In::integer("max_reuse_distance", &EngineConfig::max_reuse_distance, kElementsOrNone,
                  {.values = "ELEMENTS",
                   .help = "a released unit stays on the device if at most this many elements of "
                           "other units are used before it is used again"}),
      In::integer("param_persistence_threshold", &EngineConfig::param_persistence_threshold,
                  kElementsOrNone,
                  {.values = "ELEMENTS",
                   .help = "units of at most this many elements stay on the device between their "
                           "uses in a step"}),
  };
}

/// The setting `zero_stage`: 2 by default, unless a strategy's name says the stage.
SettingOf<EngineConfig> zero_stage() {
  return In::custom(
      "zero_stage", kInteger,
      [](const EngineConfig& c) -> SettingValue {
        if (c.strategy.zero_stage) return std::int64_t{*c.strategy.zero_stage};
        return c.strategy.name ? SettingValue{} : SettingValue{std::int64_t{kDefaultZeroStage}};
      },
      [](EngineConfig& c, const SettingValue& value) {
        c.strategy.zero_stage =
            static_cast<int>(require_in(std::get<std::int64_t>(value), {.min = 0, .max = 3}));
      },
      {.values = "0|1|2|3",
       .help = "what is divided among ranks. 0: nothing; 1 or 2: gradients and optimizer state; 3: "
               "parameters too"});
}

std::vector<SettingOf<EngineConfig>> ranks_table() {
  return {
      In::integer("tp", &EngineConfig::tensor_parallel, {.min = 1, .max = 1024},
                  {.values = "T",
                   .help = "number of neighbouring ranks that divide each layer among them (tensor "
                           "parallelism); the settings below apply to the nproc / T ranks that "
                           "have the same part",
                   .at_resume = AtResume::kFixed}),
      zero_stage(),
      In::word("strategy", [](auto& c) -> auto& { return c.strategy.name; }, kStrategyNames,
               {.values = "full|grad-op|none|hybrid",
                .help = "FSDP's names. full: stage 3; grad-op: stage 3 with units kept from "
                        "forward to backward; none: stage 0; hybrid: stage 3 (or 1 or 2) in groups "
                        "that each have a copy of the state"}),
      In::integer("shard_group", [](auto& c) -> auto& { return c.strategy.shard_group; }, kRanks,
                  {.values = "G", .help = "number of ranks in a group, with strategy hybrid"}),
      In::integer("hpz", [](auto& c) -> auto& { return c.strategy.hpz; }, kRanks,
                  {.values = "P",
                   .help = "stage 3: each P ranks of a machine keep the parameters that they have "
                           "gathered, divided among them, so that backward gathers only from these "
                           "ranks; takes 2 / P bytes of host memory per parameter"}),
      In::truth("quantized_weights", kSwitch,
                [](auto& c) -> auto& { return c.quantization.weights; },
                {.help = "stage 3: parameters travel between ranks in 8 bits, each within 0.4 % of "
                         "the largest in its block of 256"}),
      In::integer("quantized_gradients",
                  [](auto& c) -> auto& { return c.quantization.gradient_bits; },
                  {.min = 4, .max = 16},
                  {.values = "4|8",
                   .help = "stage 3: gradients travel between ranks in this many bits, within 7.2 "
                           "(4 bits) or 0.4 % (8 bits); first the ranks of a node add up their "
                           "gradients, then the nodes add up these sums"}),
      // The value from a rank's launcher matters only if exchanges are quantized.
      In::integer("ranks_per_node", &EngineConfig::ranks_per_node, kRanks,
                  {.values = "P",
                   .help = "number of ranks on one machine, for quantized exchanges; 0: the number "
                           "that the launcher gives",
                   .agreed_text =
                       [](const EngineConfig& c) {
                         return c.quantization.any() ? std::to_string(c.ranks_per_node) : "";
                       }}),
      In::parsed("reduce_dtype", &EngineConfig::reduce_dtype, dtype_of, dtype_text,
                 {.values = "bf16|fp16|fp32",
                  .help = "type of gradients between ranks (default: the parameters')"}),
      In::integer("reduce_bucket_size", &EngineConfig::reduce_bucket_elements, kElements,
                  {.values = "ELEMENTS",
                   .help = "elements of a gradient that ranks sum at once; three such buckets are "
                           "set aside in host memory"}),
  };
}

std::vector<SettingOf<EngineConfig>> store_table() {
  return {
      In::integer("slots", &EngineConfig::slots, {.min = 1, .max = 2},
                  {.values = "1|2",
                   .help = "2: every finished step is durable; 1: takes half the space, but a kill "
                           "within a step loses the run",
                   .at_resume = AtResume::kFixed}),
      In::number(
          "durable_every", &EngineConfig::durable_every_s, {.min = 0, .max = 1e9},
          {.values = "SECONDS",
           .help = "seconds from one checkpoint of optimizer state that is not on NVMe to the "
                   "next; a kill loses the steps after the last one; 0: stored only at the end"}),
      In::integer(
          "durable_every_steps", &EngineConfig::durable_every_steps, {.min = 1, .max = 1'000'000},
          {.values = "STEPS",
           .help = "with optimizer state on NVMe: one step in this many becomes durable; more than "
                   "1 writes less, but a kill loses the steps after the last durable one"}),
      In::word("resume", &EngineConfig::resume, kResumes,
               {.values = "auto|never|new|reshard",
                .help = "auto: train on from the store's last durable step; never: replace the "
                        "store; new: refuse an existing store; reshard: convert the store in place "
                        "for another number of ranks, another stage or format, and train on",
                .at_resume = AtResume::kSilent}),
  };
}

}  // namespace

std::span<const SettingOf<EngineConfig>> engine_settings() {
  static const std::vector<SettingOf<EngineConfig>> table = [] {
    std::vector<SettingOf<EngineConfig>> all;
    for (const auto& part : {optimizer_table(), memory_table(), ranks_table(), store_table()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return table;
}

Strategy strategy_of(const EngineConfig& config, int ranks) {
  const MeshShape shape = with_dp_of_world({.tp = config.tensor_parallel}, ranks);
  StrategyRequest request = config.strategy;
  if (!request.zero_stage && !request.name) request.zero_stage = kDefaultZeroStage;
  if (!config.wholes.empty()) request.hpz = 0;  // of slices, which the trainer has cut
  return resolve(request, shape.dp);
}

}  // namespace ziggurat
