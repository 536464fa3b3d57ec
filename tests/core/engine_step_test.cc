// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_step_test.cc: what a step may be told: betas of its own, settings of parameter
// groups, a loss scale; and that a step that overflowed leaves no trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "base/error.h"
#include "optimizer/loss_scale.h"
#include "tests/core/engine_harness.h"
#include "tests/support/group_settings.h"

namespace ziggurat::testing {
namespace engine_step_test {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;

struct Where {
  const char* name;
  const char* placement;
  float clip_norm;
};

class EngineStep : public ::testing::TestWithParam<Where> {
 protected:
  EngineConfig config() const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam().placement);
    config.clip_norm = GetParam().clip_norm;
    return config;
  }
  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(
    Placements, EngineStep,
    ::testing::Values(Where{"Demo", "params=host,grads=host,optimizer=nvme", 1.0F},
                      Where{"AllHost", "all=host", 1.0F}, Where{"AllNvme", "all=nvme", 1.0F},
                      Where{"AllDevice", "all=device", 1.0F},
                      Where{"NvmeUnclipped", "all=nvme", 0.0F}),
    [](const auto& one) { return std::string(one.param.name); });

StepResult step_with(Engine& engine, const ModelSpec& model, std::uint64_t data,
                     const StepOptions& options, bool overflow = false) {
  engine.prepare_step(options);
  const float scale = options.loss_scale.value_or(1.0F);
  for (auto u = static_cast<UnitId>(model.units.size()); u-- > 0;) {
    const auto params = HostDevice::view(engine.acquire(u));
    const auto gradient = HostDevice::view(engine.gradient(u));
    for (std::size_t i = 0; i < params.count(); ++i)
      gradient[i] += scale * gradient_of(value_at(params, i), u, i, data);
    if (overflow && u == 2) gradient[7] = std::numeric_limits<float>::infinity();
    engine.release(u);
    engine.finish_gradient(u);
  }
  return engine.step(options);
}

TEST_P(EngineStep, TakesTheBetasItIsGiven) {
  Rig rig(model_, config(), 2, 8 * kMiB);
  PlainTraining plain(model_, GetParam().clip_norm);
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Betas betas{.beta1 = 0.5 + 0.1 * static_cast<double>(step), .beta2 = 0.99};
    step_with(*rig.engine, model_, step,
              {.learning_rate = kLearningRate, .betas = betas, .blob = {}});
    plain.make_scalars = [&](OptimizerStep::Settings settings) {
      settings.beta1 = static_cast<float>(betas.beta1);
      settings.beta2 = static_cast<float>(betas.beta2);
      return StepScalars{OptimizerStep::make(settings)};
    };
    plain.step(step, kLearningRate);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
}

TEST_P(EngineStep, GivesEveryGroupItsSettings) {
  EngineConfig with_groups = config();
  with_groups.param_groups = {
      {.params = "unit3.*", .lr_scale = 0.5F, .weight_decay = 0.3F, .beta1 = 0.8F},
      {.params = "*.bias", .beta2 = 0.5F, .eps = 1e-3F}};
  Rig rig(model_, with_groups, 2, 8 * kMiB);
  ModelSpec grouped = model_;
  assign_groups(grouped, with_groups.param_groups);
  PlainTraining plain(grouped, GetParam().clip_norm);
  plain.make_scalars = [](const OptimizerStep::Settings& settings) {
    OptimizerStep::Settings slow = settings;
    slow.learning_rate = kLearningRate * 0.5F;
    slow.weight_decay = 0.3F;
    slow.beta1 = 0.8F;
    OptimizerStep::Settings bias = settings;
    bias.beta2 = 0.5F;
    bias.eps = 1e-3F;
    StepScalars steps{OptimizerStep::make(settings), OptimizerStep::make(slow),
                      OptimizerStep::make(bias)};
    steps[1].no_decay = steps[1].decay;  // it said so of all its parameters
    return steps;
  };
  PlainTraining without(model_, GetParam().clip_norm);
  for (std::uint64_t step = 0; step < 4; ++step) {
    train_step(*rig.engine, model_, step, kLearningRate);
    plain.step(step, kLearningRate);
    without.step(step, kLearningRate);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
  EXPECT_FALSE(same_params(*rig.engine, without, model_));
}

/// The first and the third unit are of the trainer's second group.
ModelSpec with_own_groups(ModelSpec model) {
  for (const std::size_t unit : {0U, 2U}) {
    for (ParamSpec& param : model.units[unit].params) param.group = 1;
  }
  return model;
}

std::vector<GroupStep> own_groups(std::uint64_t step) {
  return {{.learning_rate = 0.01F * static_cast<float>(step + 1), .weight_decay = 0.2F},
          {.learning_rate = 0.03F, .beta1 = 0.8F, .beta2 = 0.9F, .eps = 1e-6F}};
}

TEST_P(EngineStep, TakesATrainersOwnGroupsAnewEachStep) {
  const ModelSpec grouped = with_own_groups(model_);
  Rig rig(grouped, config(), 2, 8 * kMiB);
  PlainTraining plain(grouped, GetParam().clip_norm);
  for (std::uint64_t step = 0; step < 4; ++step) {
    const std::vector<GroupStep> groups = own_groups(step);
    step_with(*rig.engine, grouped, step, {.groups = groups, .blob = {}});
    plain.make_scalars = [&](const OptimizerStep::Settings& settings) {
      StepScalars steps;
      for (const GroupStep& group : groups) {
        steps.push_back(OptimizerStep::make(with_group(settings, group)));
        steps.back().no_decay = steps.back().decay;  // biases decay too
      }
      return steps;
    };
    plain.step(step, /*learning_rate=*/0);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, grouped));
}

TEST_P(EngineStep, TakesWhatSgdsGroupsSayAnewEachStep) {
  const ModelSpec grouped = with_own_groups(model_);
  const StateKind sgd{.optimizer = OptimizerKind::kSgd};
  EngineConfig its = config();
  its.optimizer.state = sgd;
  Rig rig(grouped, its, 2, 8 * kMiB);
  PlainTraining plain(grouped, GetParam().clip_norm, sgd);
  for (std::uint64_t step = 0; step < 4; ++step) {
    std::vector<GroupStep> groups = own_groups(step);
    groups[0].dampening = 0.5F;
    groups[1].nesterov = step != 2;
    groups[1].maximize = step == 1;
    step_with(*rig.engine, grouped, step, {.groups = groups, .blob = {}});
    plain.make_scalars = [&](const OptimizerStep::Settings& settings) {
      StepScalars steps;
      for (const GroupStep& group : groups) {
        OptimizerStep::Settings own = with_group(settings, group);
        own.dampening = group.dampening;
        own.nesterov = group.nesterov;
        own.maximize = group.maximize;
        steps.push_back(OptimizerStep::make(own));
        steps.back().no_decay = steps.back().decay;
      }
      return steps;
    };
    plain.step(step, /*learning_rate=*/0);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, grouped));
}

TEST_P(EngineStep, RefusesGroupsThatAreNotTheModels) {
  const ModelSpec grouped = with_own_groups(model_);
  Rig rig(grouped, config(), 2, 8 * kMiB);
  const std::vector<GroupStep> good = own_groups(0);
  std::vector<GroupStep> wild = good;
  wild[1].beta2 = 1.0F;
  std::vector<GroupStep> endless = good;
  endless[1].dampening = std::numeric_limits<float>::infinity();
  std::vector<GroupStep> dampened = good;  // AdamW
  dampened[0].dampening = 0.1F;
  std::vector<GroupStep> nesterovs = good;
  nesterovs[0].nesterov = true;
  const auto refused = [&](const std::vector<GroupStep>& groups, const char* words) {
    try {
      step_with(*rig.engine, grouped, 0, {.groups = groups, .blob = {}});
      ADD_FAILURE() << groups.size() << " groups were taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  };
  refused(std::vector<GroupStep>(1), "1 groups of settings were given, but the model has 2");
  refused({}, "0 groups of settings were given, but the model has 2");
  refused(wild,
          "no step can be made with the settings of group 1: learning rate 0.03, betas 0.8 and 1");
  refused(endless, "dampening inf");
  refused(dampened, "no step can be made with the settings of group 0");
  refused(nesterovs, ", nesterov: give");
  EXPECT_EQ(step_with(*rig.engine, grouped, 0, {.groups = good, .blob = {}}).generation, 1U);
}

TEST_P(EngineStep, RefusesOtherGroupsThanWereAnnounced) {
  const ModelSpec grouped = with_own_groups(model_);
  Rig rig(grouped, config(), 2, 8 * kMiB);
  pass_step(*rig.engine, grouped, 0, 0.01F);  // announces none
  const std::vector<GroupStep> groups = own_groups(0);
  EXPECT_THROW(rig.engine->step({.groups = groups, .blob = {}}), Error);
  EXPECT_EQ(rig.engine->generation(), 0U);
}

TEST_P(EngineStep, LeavesFrozenParametersAsTheyAre) {
  EngineConfig frozen = config();
  frozen.param_groups = {{.params = "unit3.*", .frozen = true},
                         {.params = "*.bias", .weight_decay = 0.3F, .frozen = true}};
  Rig rig(model_, frozen, 2, 8 * kMiB);
  ModelSpec grouped = model_;
  assign_groups(grouped, frozen.param_groups);
  PlainTraining plain(grouped, GetParam().clip_norm);
  plain.make_scalars = [](const OptimizerStep::Settings& settings) {
    OptimizerStep::Settings none = settings;
    none.learning_rate = none.weight_decay = 0;
    return StepScalars{OptimizerStep::make(settings), OptimizerStep::make(none),
                       OptimizerStep::make(none)};
  };
  const PlainTraining untrained(model_, GetParam().clip_norm);
  for (std::uint64_t step = 0; step < 4; ++step) {
    const StepResult result = train_step(*rig.engine, model_, step, kLearningRate);
    EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
  const std::vector<float> master = plain.master(3);
  EXPECT_EQ(master, untrained.master(3));
  EXPECT_NE(plain.master(2), untrained.master(2));
}

// A power of two scales and is taken back exactly, so the bits are those without a scale.
TEST_P(EngineStep, ThatOverflowedIsSkippedAndLeavesNoTrace) {
  Rig rig(model_, config(), 2, 8 * kMiB);
  PlainTraining plain(model_, GetParam().clip_norm);
  std::uint64_t generation = 0;
  float scale = 1024;
  for (std::uint64_t step = 0; step < 8; ++step) {
    const bool overflow = step == 0 || step == 3 || step == 4;
    const StepResult result =
        step_with(*rig.engine, model_, step,
                  {.learning_rate = kLearningRate, .loss_scale = scale, .blob = {}}, overflow);
    ASSERT_EQ(result.skipped, overflow);
    if (overflow) {
      scale /= 2;
      EXPECT_TRUE(same_params(*rig.engine, plain, model_)) << "after skipping " << step;
    } else {
      EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
      ++generation;
    }
    ASSERT_EQ(result.generation, generation);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
  rig.engine->make_durable();
  EXPECT_EQ(rig.engine->durable_generation(), 5U);
}

/// What a trainer with a loss scale saves: its data cursor and the scaler.
struct Saved {
  std::uint64_t data = 0;
  LossScaler::State scaler{};
};

TEST_P(EngineStep, AKillAfterAnOverflowGoesOnWithTheSameScaleDataAndBits) {
  const LossScaleConfig settings{.initial_scale_power = 8, .hysteresis = 1};
  const auto overflows = [](std::uint64_t data, double scale) {
    return data % 3 == 2 && scale > 64;
  };
  const auto run = [&](Engine& engine, LossScaler& scaler, std::uint64_t& data,
                       std::uint64_t attempts) {
    for (std::uint64_t i = 0; i < attempts; ++i, ++data) {
      LossScaler after = scaler;
      after.update(false);
      const Saved saved{.data = data + 1, .scaler = after.state()};
      const auto scale = static_cast<float>(scaler.scale());
      const StepResult result = step_with(engine, model_, data,
                                          {.learning_rate = kLearningRate,
                                           .loss_scale = scale,
                                           .blob = std::as_bytes(std::span(&saved, 1))},
                                          overflows(data, scaler.scale()));
      scaler.update(result.skipped);
    }
  };
  {
    Rig rig(model_, config(), 2, 8 * kMiB);
    LossScaler scaler(settings);
    std::uint64_t data = 0;
    run(*rig.engine, scaler, data, 2);
    rig.engine->make_durable();
    run(*rig.engine, scaler, data, 1);  // skipped; then closed as by a kill
    EXPECT_EQ(scaler.scale(), 128);
  }
  Rig rig(model_, config(), 2, 8 * kMiB);
  Saved saved;
  ASSERT_EQ(rig.engine->resumed_blob().size(), sizeof(saved));
  std::memcpy(&saved, rig.engine->resumed_blob().data(), sizeof(saved));
  EXPECT_EQ(saved.data, 2U);
  LossScaler scaler(settings, saved.scaler);
  EXPECT_EQ(scaler.scale(), 256) << "the skipped step is made, and skipped, again";
  run(*rig.engine, scaler, saved.data, 7);

  PlainTraining plain(model_, GetParam().clip_norm);
  LossScaler whole(settings);
  for (std::uint64_t data = 0; data < 9; ++data) {
    const bool overflow = overflows(data, whole.scale());
    if (!overflow) plain.step(data, kLearningRate);
    whole.update(overflow);
  }
  EXPECT_EQ(scaler.state(), whole.state());
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
}

TEST(EngineStepOptions, NonsenseIsRefused) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const auto refusal = [&](const StepOptions& options) -> std::string {
    Rig rig(model, small_config(directory.path()));
    try {
      step_with(*rig.engine, model, 0, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(refusal({.betas = Betas{.beta1 = 1, .beta2 = 0.9}, .blob = {}}),
              HasSubstr("betas are 1"));
  EXPECT_THAT(refusal({.loss_scale = 0.0F, .blob = {}}), HasSubstr("loss scale is 0"));
}

}  // namespace engine_step_test
}  // namespace ziggurat::testing
