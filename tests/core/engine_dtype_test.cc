// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_dtype_test.cc: parameters and gradients that are not bf16, as other tests have
// them: the bits of plain arrays wherever they live, and what fp16 adds: overflow, a loss scale,
// and guesses that it refutes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "optimizer/loss_scale.h"
#include "tests/core/engine_harness.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace engine_dtype_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;

ModelSpec model_in(DType dtype) {
  ModelSpec model = small_model();
  model.dtype = dtype;
  return model;
}

struct Where {
  const char* name;
  const char* placement;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kNever;
};

std::string name_of(const ::testing::TestParamInfo<std::tuple<DType, Where>>& one) {
  return std::string(to_string(std::get<DType>(one.param))) + std::get<Where>(one.param).name;
}
/// Every placement, and one in which updates are guesses.
std::vector<Where> places(const char* guessing) {
  return {{"Demo", "params=host,grads=host,optimizer=nvme"},
          {"AllNvme", "all=nvme"},
          {"AllHost", "all=host"},
          {"AllDevice", "all=device"},
          {"Guessing", guessing, EngineConfig::Speculation::kAlways}};
}

class EngineDtype : public ::testing::TestWithParam<std::tuple<DType, Where>> {
 protected:
  EngineConfig config() const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(where().placement);
    config.speculation = where().speculation;
    return config;
  }
  DType dtype() const { return std::get<DType>(GetParam()); }
  const Where& where() const { return std::get<Where>(GetParam()); }

  const ScratchDirectory directory_;
  const ModelSpec model_ = model_in(dtype());
};

INSTANTIATE_TEST_SUITE_P(
    TypesAndPlacements, EngineDtype,
    ::testing::Combine(::testing::Values(DType::kFloat16, DType::kFloat32),
                       ::testing::ValuesIn(places("params=nvme,grads=host,optimizer=nvme"))),
    name_of);

TEST_P(EngineDtype, TrainsAndResumesWithTheBitsOfPlainArrays) {
  PlainTraining plain(model_, 1.0F);
  {
    Rig rig(model_, config(), 2, 12 * kMiB);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const StepResult result = train_step(*rig.engine, model_, step, kLearningRate);
      EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
    }
    EXPECT_TRUE(same_params(*rig.engine, plain, model_));
    rig.engine->make_durable();
  }
  Rig rig(model_, config(), 2, 12 * kMiB);
  ASSERT_TRUE(rig.engine->resumed());
  EXPECT_EQ(rig.engine->acquire(0).dtype, dtype());
  rig.engine->release(0);
  EXPECT_TRUE(same_params(*rig.engine, plain, model_)) << "made from the masters";
  train_step(*rig.engine, model_, 3, kLearningRate);
  plain.step(3, kLearningRate);
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
  rig.engine->make_durable();
  EXPECT_EQ(master_of(*rig.engine, 4), plain.master(4));
}

class EngineMixed : public EngineDtype {};
INSTANTIATE_TEST_SUITE_P(Placements, EngineMixed,
                         ::testing::Combine(::testing::Values(DType::kBFloat16, DType::kFloat16),
                                            ::testing::ValuesIn(places("all=nvme"))),
                         name_of);

TEST_P(EngineMixed, HasATypeForEachUnit) {
  ModelSpec model = mixed_model();
  model.dtype = dtype();  // of the units that name none
  PlainTraining plain(model, 1.0F);
  std::uint64_t step = 0;
  for (const std::uint64_t steps : {2U, 2U}) {
    Rig rig(model, config(), 2, 12 * kMiB);
    ASSERT_EQ(rig.engine->generation(), step);
    EXPECT_TRUE(same_params(*rig.engine, plain, model));
    for (const std::uint64_t end = step + steps; step < end; ++step) {
      const StepResult result = train_step(*rig.engine, model, step, kLearningRate);
      EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
    }
    EXPECT_TRUE(same_params(*rig.engine, plain, model));
    EXPECT_EQ(rig.engine->acquire(1).dtype, DType::kFloat32);
    rig.engine->release(1);
    rig.engine->make_durable();
  }
  model.units[1].dtype = DType::kBFloat16;
  EXPECT_THROW(Rig(model, config(), 2, 12 * kMiB), Error) << "the store has another type";
}

class EngineFp16 : public EngineDtype {};
INSTANTIATE_TEST_SUITE_P(
    Placements, EngineFp16,
    ::testing::Combine(::testing::Values(DType::kFloat16),
                       ::testing::Values(Where{"AllNvme", "all=nvme"}, Where{"AllHost", "all=host"},
                                         Where{"AllDevice", "all=device"},
                                         Where{"Guessing", "all=nvme",
                                               EngineConfig::Speculation::kAlways})),
    [](const auto& one) { return std::get<Where>(one.param).name; });

/// One attempt at a step, as a trainer with a loss scale makes it.
StepResult attempt(Engine& engine, const ModelSpec& model, std::uint64_t data, float scale) {
  const StepOptions options{.learning_rate = kLearningRate, .loss_scale = scale, .blob = {}};
  engine.prepare_step(options);
  for (auto u = static_cast<UnitId>(model.units.size()); u-- > 0;) {
    const auto params = HostDevice::view(engine.acquire(u));
    const auto gradient = HostDevice::view(engine.gradient(u));
    for (std::size_t i = 0; i < params.count(); ++i)
      gradient[i] += scale * gradient_of(value_at(params, i), u, i, data);
    engine.release(u);
    engine.finish_gradient(u);
  }
  return engine.step(options);
}

// Gradients are up to 0.055: above a scale of 2^20 some are beyond fp16's 65,504.
TEST_P(EngineFp16, HalvesItsScaleUntilTheGradientsFitAndThenTrains) {
  Rig rig(model_, config(), 2, 12 * kMiB);
  PlainTraining plain(model_, 1.0F);
  LossScaler scaler({.initial_scale_power = 22, .hysteresis = 2});
  std::vector<double> scales;
  for (std::uint64_t data = 0; data < 7; ++data) {
    scales.push_back(scaler.scale());
    const auto scale = static_cast<float>(scaler.scale());
    const StepResult result = attempt(*rig.engine, model_, data, scale);
    scaler.update(result.skipped);
    if (result.skipped) {
      EXPECT_TRUE(same_params(*rig.engine, plain, model_)) << "after skipping " << data;
      continue;
    }
    plain.loss_scale = scale;
    EXPECT_EQ(result.grad_norm, plain.step(data, kLearningRate));
  }
  EXPECT_THAT(scales,
              ::testing::ElementsAre(0x1p22, 0x1p22, 0x1p21, 0x1p20, 0x1p20, 0x1p20, 0x1p20));
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
  rig.engine->make_durable();
  EXPECT_EQ(rig.engine->durable_generation(), 4U);
  const bool guessing = where().speculation == EngineConfig::Speculation::kAlways;
  EXPECT_EQ(rig.engine->metrics().value(Counter::kSpeculations), guessing ? 7U : 0U);
  EXPECT_GE(rig.engine->metrics().value(Counter::kSpeculationsRedone), guessing ? 3U : 0U)
      << "a skipped step discards what was guessed";
}

TEST(EngineDtypeStore, OfAnotherTypeIsRefusedNamingBoth) {
  const ScratchDirectory directory;
  { Rig rig(model_in(DType::kFloat16), small_config(directory.path())); }
  for (const DType other : {DType::kBFloat16, DType::kFloat32}) {
    try {
      Rig rig(model_in(other), small_config(directory.path()));
      FAIL() << "opened as " << to_string(other);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("fp16"), HasSubstr(std::string(to_string(other)))));
    }
  }
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  EXPECT_EQ(OpenStore(*runtime, directory.path()).state().content().dtype, DType::kFloat16);
}

TEST(EngineDtypeMemory, IsWhatTheTypeTakes) {
  const auto permanent_bytes = [](DType dtype) {
    const ScratchDirectory directory;
    Rig rig(model_in(dtype), small_config(directory.path()));
    return rig.engine->host_account().used_bytes(Purpose::kParams);
  };
  const std::uint64_t halves = permanent_bytes(DType::kBFloat16);
  EXPECT_EQ(permanent_bytes(DType::kFloat16), halves);
  EXPECT_GT(permanent_bytes(DType::kFloat32), halves * 19 / 10);
}

}  // namespace engine_dtype_test
}  // namespace ziggurat::testing
