// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_frozen_test.cc: parameters that are frozen when a store is made: kept once,
// never read or written by a step, no gradient of them moved; the bits are those of training that
// updates everything and changes nothing of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "core/sharding/param_groups.h"
#include "tests/core/engine_harness.h"
#include "tests/core/equal_units.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace engine_frozen_test {

using ::testing::HasSubstr;
using Speculation = EngineConfig::Speculation;

constexpr float kLearningRate = 0.01F;
constexpr float kClip = 20.0F;
constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";

/// Four units of eight tiles each.
ModelSpec even_model() { return equal_units("even", 4, 1024); }

ParamGroup frozen(const char* params) { return {.params = params, .frozen = true}; }

/// Plain training of `model` with what `groups` freeze.
PlainTraining plain_of(const ModelSpec& model, const std::vector<ParamGroup>& groups,
                       StateKind state = {}) {
  ModelSpec grouped = model;
  assign_groups(grouped, groups);
  PlainTraining plain(grouped, kClip, state);
  plain.make_scalars = [count = groups.size()](const OptimizerStep::Settings& settings) {
    OptimizerStep::Settings none = settings;
    none.learning_rate = none.weight_decay = 0;
    StepScalars steps{OptimizerStep::make(settings)};
    for (std::size_t i = 0; i < count; ++i) steps.push_back(OptimizerStep::make(none));
    return steps;
  };
  return plain;
}

bool same_masters(Engine& engine, const PlainTraining& plain, const ModelSpec& model) {
  bool same = true;
  for (UnitId u = 0; u < model.units.size(); ++u) {
    same = same && master_of(engine, u) == plain.master(u);
  }
  return same;
}

struct Moved {
  std::uint64_t records_read = 0;  ///< or found in host memory
  std::uint64_t records_written = 0;
  std::uint64_t gradients = 0;
};

/// Bytes of five steps of even_model().
Moved moved_with(const std::vector<ParamGroup>& groups, const char* placement) {
  constexpr std::uint64_t kSteps = 5;
  const ScratchDirectory directory;
  const ModelSpec model = even_model();
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(placement);
  config.host_budget_bytes = 64 * kMiB;  // nothing read ahead is taken back and read again
  config.clip_norm = kClip;
  config.param_groups = groups;
  config.speculation = Speculation::kNever;
  Rig rig(model, config);
  PlainTraining plain = plain_of(model, groups);
  const Metrics& metrics = rig.runtime->metrics;
  const std::uint64_t gradients_before = metrics.value(Counter::kDeviceToHostBytes);
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    const StepResult result = train_step(*rig.engine, model, step, kLearningRate);
    EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
  }
  rig.engine->make_durable();
  const Moved moved{.records_read = metrics.value(Counter::kStateReadBytes) +
                                    metrics.value(Counter::kRecordCacheHitBytes),
                    .records_written = metrics.value(Counter::kStateWriteBytes),
                    .gradients = metrics.value(Counter::kDeviceToHostBytes) - gradients_before};
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
  return moved;
}

TEST(EngineFrozen, AStepMovesHalfTheStateWhereHalfOfItIsFrozen) {
  for (const char* placement : {kDemo, "all=nvme"}) {
    SCOPED_TRACE(placement);
    const Moved all = moved_with({}, placement);
    const Moved half = moved_with({frozen("unit0.*"), frozen("unit2.*")}, placement);
    EXPECT_GT(half.records_written, 0U);
    EXPECT_EQ(2 * half.records_written, all.records_written);
    EXPECT_EQ(2 * half.records_read, all.records_read);
    EXPECT_EQ(2 * half.gradients, all.gradients);
  }
}

TEST(EngineFrozen, AStoreIsSmallerByTheOptimizerStateThatItDoesNotHold) {
  const auto bytes_with = [](const std::vector<ParamGroup>& groups) {
    const ScratchDirectory directory;
    EngineConfig config = small_config(directory.path());
    config.param_groups = groups;
    const Rig rig(even_model(), config);
    std::uint64_t bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(directory.path()))
      bytes += file.file_size();
    return bytes;
  };
  const std::uint64_t elements = even_model().units[0].count();
  const std::uint64_t saved = bytes_with({}) - bytes_with({frozen("unit0.*")});
  EXPECT_EQ(saved, elements * (2 * 12 - 4)) << "two slots of 12 bytes, and then one of 4";
}

TEST(EngineFrozen, AStoreNamesWhatItHoldsOnceSoThatWhoeverReadsItCanOpenIt) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.param_groups = {frozen("unit?.weight")};
  { const Rig rig(small_model(), config); }
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  const std::vector<std::string> constant =
      ChunkTable::constant_params(OpenStore(*runtime, directory.path()).state().layout());
  EXPECT_EQ(constant.size(), small_model().units.size());
  config.param_groups.clear();
  for (const std::string& name : constant) config.param_groups.push_back(frozen(name.c_str()));
  const Rig rig(small_model(), config);
  EXPECT_TRUE(same_masters(*rig.engine, PlainTraining(small_model(), kClip), small_model()));
}

/// For who only looks: parameters in memory, and nothing else.
TEST(EngineFrozen, WithoutAStoreHasTheParametersOfAnyState) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  PlainTraining plain(model, 1.0F);
  {
    Rig rig(model, small_config(directory.path()));
    for (std::uint64_t step = 0; step < 2; ++step) {
      train_step(*rig.engine, model, step, kLearningRate);
      plain.step(step, kLearningRate);
    }
    rig.engine->make_durable();
  }
  const auto runtime = Runtime::create({.threads = 2, .trace_path = ""});
  const auto device = HostDevice::create(runtime->reactor, 8 * kMiB);
  OpenStore store(*runtime, directory.path());
  EngineConfig config = small_config(directory.path());
  config.store.clear();
  config.placement = parse_placement("all=host");
  const auto open = [&] {
    return Engine::open(model, config, *runtime, *device, store.state(), {.weights_only = true});
  };
  const auto refusal = [&] {
    try {
      open();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("opened");
  };
  EXPECT_THAT(refusal(), HasSubstr("`store` is missing: give a directory, unless"));
  config.param_groups = {frozen("*")};
  const auto engine = open();
  EXPECT_TRUE(same_params(*engine, plain, model));
  const Account account = engine->host_account();
  EXPECT_LT(account.used_bytes(), account.used_bytes(Purpose::kParams) * 11 / 10);
  EXPECT_THROW(engine->read_master(0, 0), Error);
}

struct FrozenCase {
  const char* name;
  const char* placement = kDemo;
  StateFormat format = StateFormat::kFp32;
  Speculation speculation = Speculation::kNever;
  int slots = 2;
  std::uint64_t host_bytes = 8 * kMiB;
};

class EngineFrozenIn : public ::testing::TestWithParam<FrozenCase> {
 protected:
  EngineConfig config(const std::vector<ParamGroup>& groups) const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam().placement);
    config.host_budget_bytes = GetParam().host_bytes;
    config.optimizer.state.format = GetParam().format;
    config.speculation = GetParam().speculation;
    config.slots = GetParam().slots;
    config.clip_norm = kClip;
    config.param_groups = groups;
    return config;
  }
  /// Steps [first, first + 3) of a run that goes on, with every third one loud enough to be
  /// clipped.
  void run(PlainTraining& plain, const std::vector<ParamGroup>& groups, std::uint64_t first) {
    Rig rig(model_, config(groups), 2, 8 * kMiB);
    ASSERT_EQ(rig.engine->generation(), first);
    EXPECT_TRUE(same_params(*rig.engine, plain, model_)) << "before step " << first;
    for (std::uint64_t step = first; step < first + 3; ++step) {
      const float loudness = step % 3 == 1 ? 4.0F : 1.0F;
      const StepResult result = train_step(*rig.engine, model_, step, kLearningRate, {}, loudness);
      ASSERT_EQ(result.grad_norm, plain.step(step, kLearningRate, loudness));
    }
    EXPECT_TRUE(same_params(*rig.engine, plain, model_)) << "after step " << first + 2;
    rig.engine->make_durable();
    EXPECT_TRUE(same_masters(*rig.engine, plain, model_)) << "after step " << first + 2;
  }

  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(
    Everywhere, EngineFrozenIn,
    ::testing::Values(
        FrozenCase{.name = "Demo"}, FrozenCase{.name = "DemoOneSlot", .slots = 1},
        FrozenCase{.name = "DemoGuessing", .speculation = Speculation::kAlways},
        FrozenCase{.name = "AllNvme", .placement = "all=nvme", .host_bytes = 5 * kMiB},
        FrozenCase{.name = "AllHost", .placement = "all=host", .host_bytes = 16 * kMiB},
        FrozenCase{.name = "AllDevice", .placement = "all=device"},
        FrozenCase{.name = "Split", .format = StateFormat::kSplit},
        FrozenCase{.name = "EightBit", .format = StateFormat::k8Bit}),
    [](const auto& one) { return std::string(one.param.name); });

// Unit 4 has a frozen weight: the tiles that have nothing else are constant, and the last one,
// which has the bias too, is not. Unit 1 is constant as a whole.
TEST_P(EngineFrozenIn, HalfAUnitAndAWholeOneStayAsTheyAreThroughARestart) {
  const std::vector<ParamGroup> groups{frozen("unit4.weight"), frozen("unit1.*")};
  PlainTraining plain = plain_of(model_, groups, {.format = GetParam().format});
  run(plain, groups, 0);
  run(plain, groups, 3);
}

// What is frozen since the store was made has optimizer state, and is updated with nothing.
TEST_P(EngineFrozenIn, MoreMayBeFrozenAtResume) {
  const std::vector<ParamGroup> groups{frozen("unit1.*"), frozen("unit4.weight")};
  PlainTraining plain = plain_of(model_, groups, {.format = GetParam().format});
  {
    const std::vector<ParamGroup> fewer{frozen("unit1.*")};
    const Rig rig(model_, config(fewer), 2, 8 * kMiB);
  }
  run(plain, groups, 0);
  run(plain, groups, 3);
}

TEST_P(EngineFrozenIn, WhatWasFrozenWhenTheStoreWasMadeIsNotTrainedFromIt) {
  PlainTraining plain = plain_of(model_, {frozen("unit1.*")}, {.format = GetParam().format});
  run(plain, {frozen("unit1.*")}, 0);
  try {
    const Rig rig(model_, config({}), 2, 8 * kMiB);
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("'unit1.weight' was frozen when the store was made"));
  }
  run(plain, {frozen("unit1.*")}, 3);
}

TEST_P(EngineFrozenIn, GenerationsAreMadeAlsoWhereNothingIsTrained) {
  PlainTraining plain = plain_of(model_, {frozen("*")}, {.format = GetParam().format});
  run(plain, {frozen("*")}, 0);
  run(plain, {frozen("*")}, 3);
}

}  // namespace engine_frozen_test
}  // namespace ziggurat::testing
