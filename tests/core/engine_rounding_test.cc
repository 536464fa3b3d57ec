// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_rounding_test.cc: state that is kept in bf16 is rounded with a parameter's own
// noise: the same bits among any ranks, in any units, beside any other parameters, and after a
// resume; and a store keeps the rounding that it was made with.
#include <gmock/gmock.h>

#include <map>

#include "core/checkpoint/stored_state.h"
#include "tests/core/engine_harness.h"
#include "tests/core/open_store.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_rounding_test {

using ::testing::HasSubstr;

constexpr std::uint64_t kSteps = 4;
using Values = std::map<std::string, std::vector<float>>;  // by parameter

ParamSpec param(const std::string& name, std::int64_t count) {
  return {.name = name, .shape = {count}, .decay = true};
}

ModelSpec model_of(std::vector<UnitSpec> units, StateFormat format) {
  // Parameters are the masters, whatever the format.
  const DType dtype = format == StateFormat::kBf16 ? DType::kBFloat16 : DType::kFloat32;
  return {.name = "small", .units = std::move(units), .dtype = dtype};
}
std::vector<UnitSpec> usual_units() {
  return {{.name = "one", .params = {param("a", 30'000), param("b", 77)}},
          {.name = "two", .params = {param("c", 50'000)}}};
}

float mixed(const std::string& name, std::uint64_t i, std::uint64_t step) {
  const std::uint64_t value = (i * 2654435761U + step * 40503U + name.front() * 977U) % 4099U;
  return static_cast<float>(value % 3 + 1) * (value % 2 == 0 ? 0x1p-8F : -0x1p-8F);
}

/// `body(param, its element, the unit's)` of each element [first, first + count) of the unit.
template <class Body>
void each_element(const UnitSpec& unit, std::uint64_t first, std::uint64_t count, Body body) {
  std::uint64_t begin = 0;
  for (const ParamSpec& its : unit.params) {
    for (std::uint64_t i = 0; i < its.count(); ++i) {
      const std::uint64_t at = begin + i;
      if (at >= first && at < first + count) body(its.name, i, at - first);
    }
    begin += its.count();
  }
}

class Trainer {
 public:
  Trainer(Runtime& runtime, ModelSpec model, const EngineConfig& config)
      : model_(std::move(model)),
        device_(HostDevice::create(runtime.reactor, 8 * kMiB, nullptr, &runtime.metrics)),
        engine_(Engine::open(model_, config, runtime, *device_,
                             [this](UnitId unit, std::uint64_t first, std::span<float> values) {
                               each_element(model_.units[unit], first, values.size(),
                                            [&](const auto& name, auto i, auto at) {
                                              values[at] = 64 * mixed(name, i, 99);
                                            });
                             })) {}

  /// All ranks have one gradient, which their mean is, exactly.
  void step() {
    const std::uint64_t step = engine_->generation();
    engine_->prepare_step({.learning_rate = 1e-3F, .blob = {}});
    const auto units = static_cast<UnitId>(model_.units.size());
    for (UnitId u = 0; u < units; ++u) {
      engine_->acquire(u);
      engine_->release(u);
    }
    for (UnitId u = units; u-- > 0;) {
      engine_->acquire(u);
      const auto gradient = HostDevice::view(engine_->gradient(u));
      each_element(model_.units[u], 0, model_.units[u].count(),
                   [&](const auto& name, auto i, auto at) { gradient[at] = mixed(name, i, step); });
      engine_->release(u);
      engine_->finish_gradient(u);
    }
    engine_->step({.learning_rate = 1e-3F, .blob = {}});
  }
  Values values() {
    Values all;
    for (UnitId u = 0; u < model_.units.size(); ++u) {
      const auto params = HostDevice::view(engine_->acquire(u));
      each_element(
          model_.units[u], 0, model_.units[u].count(),
          [&](const auto& name, auto, auto at) { all[name].push_back(value_at(params, at)); });
      engine_->release(u);
    }
    return all;
  }
  Engine& engine() { return *engine_; }

 private:
  ModelSpec model_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
};

EngineConfig config_of(const std::string& directory, StateFormat format) {
  EngineConfig config = small_config(directory);
  config.clip_norm = 0;
  config.optimizer.state.format = format;
  return config;
}

/// What rank 0 has after kSteps, all ranks having the same.
Values trained(const std::vector<UnitSpec>& units, StateFormat format, int ranks = 1) {
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(ranks, 1);
  std::vector<Values> made(static_cast<std::size_t>(ranks));
  expect_none(run_ranks(ranks, [&](int rank) {
    Trainer trainer(*runtimes[static_cast<std::size_t>(rank)], model_of(units, format),
                    config_of(directory.path(), format));
    for (std::uint64_t step = 0; step < kSteps; ++step) trainer.step();
    made[static_cast<std::size_t>(rank)] = trainer.values();
    trainer.engine().make_durable();
  }));
  for (const Values& its : made) EXPECT_EQ(its, made[0]);
  return made[0];
}

class RoundedState : public ::testing::TestWithParam<StateFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RoundedState,
                         ::testing::Values(StateFormat::kBf16, StateFormat::kBf16Moments),
                         [](const auto& of) {
                           return of.param == StateFormat::kBf16 ? "bf16" : "bf16_moments";
                         });

TEST_P(RoundedState, HasTheBitsOfOneRankAmongSeveral) {
  const Values alone = trained(usual_units(), GetParam());
  EXPECT_EQ(trained(usual_units(), GetParam(), 2), alone);
  EXPECT_EQ(trained(usual_units(), GetParam(), 3), alone);
}

TEST_P(RoundedState, HasTheSameBitsInOtherUnitsAndBesideOtherParameters) {
  const Values usual = trained(usual_units(), GetParam());
  const std::vector<UnitSpec> together{
      {.name = "all", .params = {param("c", 50'000), param("b", 77), param("a", 30'000)}}};
  EXPECT_EQ(trained(together, GetParam()), usual);
  std::vector<UnitSpec> more = usual_units();
  more[0].params.insert(more[0].params.begin(), param("added", 1234));
  more.insert(more.begin(), {.name = "zero", .params = {param("d", 20'000)}});
  Values beside = trained(more, GetParam());
  beside.erase("added");
  beside.erase("d");
  EXPECT_EQ(beside, usual);
}

TEST_P(RoundedState, GoesOnWithTheSameBitsAfterAResume) {
  const Values usual = trained(usual_units(), GetParam());
  const ScratchDirectory directory;
  const auto runtime = Runtime::create({.threads = 2, .trace_path = ""});
  Values resumed;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    Trainer trainer(*runtime, model_of(usual_units(), GetParam()),
                    config_of(directory.path(), GetParam()));
    trainer.step();
    resumed = trainer.values();
    trainer.engine().make_durable();
  }
  EXPECT_EQ(resumed, usual);
}

std::optional<Roundings> named_in(const std::string& directory) {
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  return OpenStore(*runtime, directory).state().content().rounding;
}

std::string refusal(const EngineConfig& config) {
  try {
    const Rig rig(small_model(), config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TEST(StoreRounding, IsStochasticInANewStoreThatKeepsBf16AndForItsLife) {
  const ScratchDirectory directory;
  EngineConfig config = config_of(directory.path(), StateFormat::kBf16);
  { const Rig rig(small_model(), config); }
  EXPECT_EQ(named_in(directory.path()), (Roundings{.state = Rounding::kStochastic}));
  config.optimizer.state_rounding = Rounding::kNearest;
  EXPECT_THAT(refusal(config), HasSubstr("made with `state_rounding=stochastic`"));
  config.optimizer.state_rounding = Rounding::kStochastic;
  { const Rig rig(small_model(), config); }
  // The parameter is the master there: nothing rounds one to the other.
  config.optimizer.param_rounding = Rounding::kStochastic;
  const Rig rig(small_model(), config);
}

TEST(StoreRounding, IsNearestWhereANewStoreWasToldSo) {
  const ScratchDirectory directory;
  EngineConfig config = config_of(directory.path(), StateFormat::kBf16Moments);
  config.optimizer.state_rounding = Rounding::kNearest;
  { const Rig rig(small_model(), config); }
  EXPECT_EQ(named_in(directory.path()), Roundings());
  config.optimizer.state_rounding.reset();
  { const Rig rig(small_model(), config); }
  EXPECT_EQ(named_in(directory.path()), Roundings());
  config.optimizer.param_rounding = Rounding::kStochastic;
  EXPECT_THAT(refusal(config), HasSubstr("made with `param_rounding=nearest`"));
}

/// A store of fp32 state that rounds its parameters says how, and of state nothing is asked.
TEST(StoreRounding, OfStateIsNotAskedForWhereNoneIsRounded) {
  const ScratchDirectory directory;
  EngineConfig config = config_of(directory.path(), StateFormat::kFp32);
  config.optimizer.param_rounding = Rounding::kStochastic;
  config.optimizer.state_rounding = Rounding::kStochastic;
  { const Rig rig(small_model(), config); }
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic}) {
    config.optimizer.state_rounding = rounding;
    const Rig rig(small_model(), config);
  }
  config.optimizer.param_rounding = Rounding::kNearest;
  EXPECT_THAT(refusal(config), HasSubstr("made with `param_rounding=stochastic`"));
}

TEST(StoreRounding, IsNotNamedWhereNothingIsDrawn) {
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kSplit, StateFormat::k8Bit}) {
    const ScratchDirectory directory;
    { const Rig rig(small_model(), config_of(directory.path(), format)); }
    EXPECT_EQ(named_in(directory.path()), std::nullopt) << to_string(format);
  }
}

/// As all stores were that `train` made before layouts named their rounding.
TEST(StoreRounding, OfAStoreThatNamesNoneIsTheRunsByNoiseOfTiles) {
  const ScratchDirectory directory;
  EngineConfig config = config_of(directory.path(), StateFormat::kFp32);
  { const Rig rig(small_model(), config); }
  PlainTraining expected(small_model(), 0);
  config.optimizer.param_rounding = Rounding::kStochastic;
  expected.round_parameters(Rounding::kStochastic);
  for (std::uint64_t step = 0; step < 4; ++step) {
    Rig rig(small_model(), config);
    ASSERT_TRUE(same_params(*rig.engine, expected, small_model())) << "as resumed";
    train_step(*rig.engine, small_model(), step, 0.01F);
    expected.step(step, 0.01F);
    EXPECT_TRUE(same_params(*rig.engine, expected, small_model())) << step;
    rig.engine->make_durable();
  }
  EXPECT_EQ(named_in(directory.path()), std::nullopt);
}

TEST(StoreRounding, OfACopyIsAsItWas) {
  OptimizerConfig config;
  config.state.format = StateFormat::kBf16;
  StateContent of;
  of.state = StateKind{OptimizerKind::kAdamW, StateFormat::kBf16};
  const Roundings nearest;
  const Roundings usual{.state = Rounding::kStochastic};
  of.rounding = nearest;
  EXPECT_EQ(rounding_of_copy(config, of, false), nearest);
  EXPECT_EQ(rounding_of_copy(config, of, true), nearest);
  of.rounding.reset();
  EXPECT_EQ(rounding_of_copy(config, of, false), usual);
  EXPECT_EQ(rounding_of_copy(config, of, true), std::nullopt);
  of.state->format = StateFormat::kFp32;
  EXPECT_EQ(rounding_of_copy(config, of, true), usual);
  config.state.format = StateFormat::kFp32;
  EXPECT_EQ(rounding_of_copy(config, of, true), std::nullopt);
}

}  // namespace engine_rounding_test
}  // namespace ziggurat::testing
