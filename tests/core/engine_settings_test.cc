// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_settings_test.cc: the table of the engine's settings has every field, each is
// written as it is read, and what ranks must have alike shows where they differ.
#include "core/engine/engine_settings.h"

#include <gmock/gmock.h>

#include <map>
#include <set>

#include "base/error.h"

namespace ziggurat {
namespace engine_settings_test {

using ::testing::HasSubstr;

const SettingOf<EngineConfig>& setting(std::string_view name) {
  for (const SettingOf<EngineConfig>& its : engine_settings()) {
    if (its.name == name) return its;
  }
  throw std::out_of_range(std::string(name));
}

void write(EngineConfig& config, std::string_view name, const std::string& text) {
  const SettingOf<EngineConfig>& its = setting(name);
  its.write(config, parse_setting(its.kind, text));
}

std::string complaint(std::string_view name, const std::string& text) {
  EngineConfig config;
  try {
    write(config, name, text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

/// For every setting, a value that is not the default.
const std::map<std::string, std::string>& others() {
  static const std::map<std::string, std::string> texts{
      {"optimizer", "lion"},
      {"state_format", "8bit"},
      {"state_rounding", "nearest"},
      {"param_rounding", "stochastic"},
      {"rounding", "stochastic"},
      {"betas", "0.8,0.9"},
      {"eps", "1e-06"},
      {"weight_decay", "0.25"},
      {"initial_accumulator", "0.125"},
      {"param_groups", "h.*:lr-scale=0.5,weight-decay=0.25,frozen;*:beta1=0.5,beta2=0.6,eps=0.1"},
      {"clip", "0.5"},
      {"speculate", "never"},
      {"host_memory", "64MiB"},
      {"placement", "params=device,grads=nvme,optimizer=host"},
      {"prefetch_bucket_size", "7"},
      {"max_live_parameters", "8"},
      {"max_reuse_distance", "9"},
      {"param_persistence_threshold", "10"},
      {"tp", "2"},
      {"zero_stage", "3"},
      {"strategy", "grad-op"},
      {"shard_group", "4"},
      {"hpz", "2"},
      {"quantized_weights", "true"},
      {"quantized_gradients", "8"},
      {"ranks_per_node", "4"},
      {"reduce_dtype", "fp32"},
      {"reduce_bucket_size", "11"},
      {"slots", "1"},
      {"durable_every", "60"},
      {"durable_every_steps", "5"},
      {"resume", "never"},
  };
  return texts;
}

// A field is in the table, or a trainer works it out: a new one is named here, and if ranks must
// have it alike it has an entry in the table.
TEST(EngineSettings, HaveEveryFieldOfTheConfig) {
  const EngineConfig config;
  const auto& [store, placement, host_budget_bytes, trainer_device_bytes, trainer_held_units,
               tensor_parallel, strategy, quantization, ranks_per_node, reduce_dtype,
               reduce_bucket_elements, prefetch_elements_max, optimizer, param_groups, clip_norm,
               speculation, max_live_parameters, max_reuse_distance, param_persistence_threshold,
               slots, blob_bytes_max, durable_every_s, durable_every_steps, checkpoint, resume,
               run_identity, numerics_fingerprint, progress, before_reshard, first_elements, wholes,
               counts_steps, before_seal] = config;
  // A rank's own: its directories, what its trainer takes, what it calls back.
  static_cast<void>(std::tie(store, checkpoint, trainer_device_bytes, trainer_held_units, progress,
                             before_reshard, first_elements, before_seal));
  static_cast<void>(wholes);  // compared by WholeUnits
  // One that lends its memory sets room aside for its blob, and counts or not, and it is alone.
  static_cast<void>(std::tie(blob_bytes_max, counts_steps));
  // Compared by agree_on_settings() and check_identity() themselves.
  static_cast<void>(std::tie(run_identity, numerics_fingerprint));
  // In the table: strategy, quantization and optimizer have several entries each.
  static_cast<void>(std::tie(placement, host_budget_bytes, tensor_parallel, ranks_per_node,
                             reduce_dtype, reduce_bucket_elements, prefetch_elements_max,
                             param_groups, clip_norm, speculation, max_live_parameters,
                             max_reuse_distance, param_persistence_threshold, slots,
                             durable_every_s, durable_every_steps, resume));
  const auto& [zero_stage, name, shard_group, hpz] = strategy;
  const auto& [weights, gradient_bits] = quantization;
  const auto& [state, state_rounding, param_rounding, rounding_seed, beta1, beta2, eps,
               weight_decay, initial_accumulator] = optimizer;
  static_cast<void>(std::tie(zero_stage, name, shard_group, hpz, weights, gradient_bits, state,
                             state_rounding, param_rounding, beta1, beta2, eps, weight_decay,
                             initial_accumulator));
  static_cast<void>(rounding_seed);  // compared by agree_on_settings()
  EXPECT_EQ(engine_settings().size(), others().size());
}

TEST(EngineSettings, AreReadAsTheyWereWritten) {
  for (const SettingOf<EngineConfig>& its : engine_settings()) {
    SCOPED_TRACE(its.name);
    ASSERT_TRUE(others().contains(its.name)) << "a new setting has a value in others()";
    EngineConfig config;
    EXPECT_EQ(its.text(config), its.default_text);
    write(config, its.name, others().at(its.name));
    EXPECT_EQ(its.text(config), others().at(its.name));
    EXPECT_NE(its.text(config), its.default_text);
  }
}

TEST(EngineSettings, DifferWhereRanksDiffer) {
  const std::set<std::string> own{"host_memory"};
  for (const SettingOf<EngineConfig>& its : engine_settings()) {
    SCOPED_TRACE(its.name);
    EXPECT_EQ(its.among_ranks == AmongRanks::kOwn, own.contains(its.name));
    EngineConfig config;
    config.quantization.weights = its.name == "ranks_per_node";
    const std::string before = its.agreed(config);
    write(config, its.name, others().at(its.name));
    EXPECT_NE(its.agreed(config), before);
  }
}

TEST(EngineSettings, ParametersAndGradientsMayBeElsewhereOnEachRank) {
  EngineConfig a, b;
  write(b, "placement", "params=device,grads=nvme,optimizer=nvme");
  EXPECT_EQ(setting("placement").agreed(a), setting("placement").agreed(b));
}

TEST(EngineSettings, RanksOfANodeMatterWhereSomethingGoesNodeByNode) {
  EngineConfig a, b;
  write(b, "ranks_per_node", "4");
  EXPECT_EQ(setting("ranks_per_node").agreed(a), setting("ranks_per_node").agreed(b));
}

TEST(EngineSettings, ComplaintsSayWhatWouldDo) {
  EXPECT_EQ(complaint("slots", "3"), " is out of range: give 1 to 2");
  EXPECT_EQ(complaint("slots", "two"), " is not a whole number");
  EXPECT_EQ(complaint("clip", "nan"), " is not a number");
  EXPECT_EQ(complaint("betas", "0.9"), " has 1 numbers: give 2, with commas between");
  EXPECT_EQ(complaint("host_memory", "lots"),
            " is not a size: write it like 160MiB, 1.5GiB or 2GB");
  EXPECT_THAT(complaint("resume", "maybe"), HasSubstr(" is none of auto, never"));
  EXPECT_THAT(complaint("reduce_dtype", "int4"), HasSubstr(" is none of bf16, fp16, fp32"));
  EXPECT_THAT(complaint("placement", "params=moon"), HasSubstr("'moon' is not a tier"));
  EXPECT_THAT(complaint("param_groups", "h.*"), HasSubstr("'h.*' is not a parameter group"));
}

TEST(EngineSettings, AStageIsTwoUnlessAStrategySaysMore) {
  EngineConfig config;
  EXPECT_EQ(strategy_of(config, 4).zero_stage, 2);
  config.strategy.name = StrategyName::kGradOp;
  EXPECT_EQ(strategy_of(config, 4).zero_stage, 3);
  EXPECT_TRUE(strategy_of(config, 4).keeps_params_to_backward);
  config.tensor_parallel = 3;
  EXPECT_THROW(strategy_of(config, 4), Error);
}

}  // namespace engine_settings_test
}  // namespace ziggurat
