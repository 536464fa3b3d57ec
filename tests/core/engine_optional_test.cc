// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_optional_test.cc: units that have no gradient in some steps, as a router leaves
// experts without any: they stay as they are, on every tier, and among ranks of which each has
// others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "tests/core/lent_trainer.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_optional_test {

using ::testing::HasSubstr;
using enum StateFormat;

/// The second, third and last may have no gradient; the last has several chunks.
const std::vector<std::int64_t> kSizes{20'000, 16'384, 50'000, 300, 120'000};
constexpr std::array<UnitId, 3> kOptional{1, 2, 4};

/// The trainer's groups are one for each unit.
ModelSpec model_in_groups() {
  ModelSpec model = lent_model(kSizes, DType::kFloat32);
  for (const UnitId u : kOptional) model.units[u].optional = true;
  return model;
}
ModelSpec model_of_experts() {
  ModelSpec model = model_in_groups();
  for (UnitSpec& unit : model.units) unit.params[0].group = 0;
  return model;
}

/// What a router leaves out, step by step: some, others, all, none.
const std::vector<std::set<UnitId>> kLeftOut{{}, {1, 4}, {2}, {1, 2, 4}, {}, {4}};

/// Adds a gradient to every unit but those of `left_out`, in the order of backward.
void backward(Engine& engine, const std::set<UnitId>& left_out, std::uint64_t generation,
              int rank = 0, bool acquires_all = false) {
  for (auto u = static_cast<UnitId>(kSizes.size()); u-- > 0;) {
    if (acquires_all) {
      engine.acquire(u);
      engine.release(u);
    }
    if (left_out.contains(u)) continue;
    const auto gradient = HostDevice::view(engine.gradient(u));
    const auto count = static_cast<std::size_t>(kSizes[u]);
    for (std::size_t i = 0; i < count; ++i)
      gradient[i] += gradient_of(initial_value(u, i), u, i, generation, rank);
    engine.finish_gradient(u);
  }
}

void expect_params(Engine& engine, const std::vector<TypedArray>& expected, const char* when) {
  for (UnitId u = 0; u < kSizes.size(); ++u) {
    const auto got = HostDevice::view(engine.acquire(u));
    EXPECT_TRUE(std::ranges::equal(got.bytes.first(expected[u].bytes.size()), expected[u].bytes))
        << when << ", unit " << u;
    engine.release(u);
  }
}

struct Tiers {
  const char* name;
  const char* placement;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kNever;
  int slots = 2;
};

EngineConfig config_of(const ScratchDirectory& directory, const Tiers& tiers) {
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(tiers.placement);
  config.speculation = tiers.speculation;
  config.slots = tiers.slots;
  config.clip_norm = 0;
  config.optimizer.rounding_seed = kRoundingSeed;
  return config;
}

class EngineOptional : public ::testing::TestWithParam<std::tuple<Tiers, StateFormat>> {
 protected:
  EngineConfig config() const {
    EngineConfig config = config_of(directory_, std::get<Tiers>(GetParam()));
    config.optimizer.state.format = std::get<StateFormat>(GetParam());
    config.optimizer.state_rounding = config.optimizer.param_rounding = Rounding::kNearest;
    return config;
  }
  const ScratchDirectory directory_;
};

// The trainer of lent parameters makes the same steps in plain arrays.
TEST_P(EngineOptional, HasTheBitsOfAnEngineThatIsLentItsParameters) {
  const ModelSpec model = model_in_groups();
  LentTrainer plain(model, config().optimizer.state, Rounding::kNearest);
  std::uint64_t generation = 0;
  for (const std::size_t steps : {std::size_t{4}, kLeftOut.size() - 4}) {
    Rig rig(model, config(), 2, 12 * kMiB);
    ASSERT_EQ(rig.engine->generation(), generation);
    expect_params(*rig.engine, plain.params, "opened");
    for (std::size_t i = 0; i < steps; ++i) {
      const LentStep step{.left_out = kLeftOut[generation]};
      const std::vector<GroupStep> groups = plain.groups_of(step);
      StepOptions options{.blob = {}};
      options.groups = groups;
      rig.engine->prepare_step(options);
      ++generation;
      backward(*rig.engine, step.left_out, generation);
      rig.engine->step(options);
      plain.plain_step(generation, step);
      expect_params(*rig.engine, plain.params, "stepped");
    }
    rig.engine->make_durable();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Everywhere, EngineOptional,
    ::testing::Combine(
        ::testing::Values(Tiers{.name = "Demo",
                                .placement = "params=host,grads=host,optimizer=nvme"},
                          Tiers{.name = "AllNvme", .placement = "all=nvme"},
                          Tiers{.name = "OneSlot", .placement = "all=nvme", .slots = 1},
                          Tiers{.name = "AllHost", .placement = "all=host"},
                          Tiers{.name = "AllDevice", .placement = "all=device"},
                          Tiers{.name = "Guessing",
                                .placement = "params=host,grads=host,optimizer=nvme",
                                .speculation = EngineConfig::Speculation::kAlways}),
        ::testing::Values(kFp32, kBf16Moments, k8Bit)),
    [](const auto& its) {
      std::string format(to_string(std::get<StateFormat>(its.param)));
      std::erase(format, '-');
      return std::get<Tiers>(its.param).name + format;
    });

TEST(EngineOptionalSteps, CountNothingOfAUnitThatIsLeftOutInTheNorm) {
  const ScratchDirectory directory;
  const ModelSpec model = model_of_experts();
  EngineConfig config = config_of(directory, {.name = "", .placement = "all=host"});
  Rig rig(model, config, 2, 12 * kMiB);
  backward(*rig.engine, {}, 1);
  const double all = rig.engine->step({.learning_rate = 0, .blob = {}}).grad_norm;
  backward(*rig.engine, {1, 2, 4}, 1);
  const double some = rig.engine->step({.learning_rate = 0, .blob = {}}).grad_norm;
  double squares = 0;
  for (const UnitId u : {UnitId{0}, UnitId{3}}) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(kSizes[u]); ++i) {
      const double value = gradient_of(initial_value(u, i), u, i, 1);
      squares += value * value;
    }
  }
  EXPECT_NEAR(some, std::sqrt(squares), 1e-6 * some);
  EXPECT_LT(some, all);
}

TEST(EngineOptionalSteps, AreMadeWithoutAnyGradient) {
  const ScratchDirectory directory;
  ModelSpec model = model_of_experts();
  for (UnitSpec& unit : model.units) unit.optional = true;
  Rig rig(model, config_of(directory, {.name = "", .placement = "all=nvme"}), 2, 12 * kMiB);
  const LentTrainer plain(model, {});
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(rig.engine->step({.learning_rate = 1, .blob = {}}).grad_norm, 0);
    expect_params(*rig.engine, plain.params, "nothing had a gradient");
  }
  rig.engine->make_durable();
  EXPECT_EQ(rig.engine->durable_generation(), 3U);
}

TEST(EngineOptionalSteps, RefuseAGradientThatIsNotFinished) {
  const ScratchDirectory directory;
  const ModelSpec model = model_of_experts();
  Rig rig(model, config_of(directory, {.name = "", .placement = "all=host"}), 2, 12 * kMiB);
  backward(*rig.engine, {1}, 1);
  rig.engine->gradient(1);
  try {
    rig.engine->step({.learning_rate = 0.1F, .blob = {}});
    FAIL() << "made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("unit 1"));
  }
  rig.engine->finish_gradient(1);
  EXPECT_EQ(rig.engine->step({.learning_rate = 0.1F, .blob = {}}).generation, 1U);
}

/// What each of two ranks leaves out, step by step.
struct Routed {
  std::array<std::set<UnitId>, 2> left_out;
};
const std::vector<Routed> kRouted{{{{{1}, {2, 4}}}},   {{{{1, 2}, {1, 4}}}},
                                  {{{{1, 2, 4}, {}}}}, {{{{1, 2, 4}, {1, 2, 4}}}},
                                  {{{{}, {}}}},        {{{{4}, {4}}}}};

class EngineOptionalRanks : public ::testing::TestWithParam<std::tuple<int, const char*>> {};

TEST_P(EngineOptionalRanks, HaveTheBitsOfOneThatHasTheGradientsOfAll) {
  const auto& [stage, placement] = GetParam();
  const ModelSpec model = model_of_experts();
  const ScratchDirectory alone;
  const Tiers tiers{.name = "", .placement = placement};
  std::vector<std::vector<TypedArray>> expected;
  std::vector<double> norms;
  {
    Rig rig(model, config_of(alone, tiers), 2, 12 * kMiB);
    for (std::uint64_t step = 0; step < kRouted.size(); ++step) {
      std::set<UnitId> nowhere;
      for (UnitId u = 0; u < kSizes.size(); ++u) {
        const auto& [first, second] = kRouted[step].left_out;
        if (first.contains(u) && second.contains(u)) {
          nowhere.insert(u);
          continue;
        }
        // In rank order, as ranks are summed.
        const auto sum = HostDevice::view(rig.engine->gradient(u));
        for (int rank = 0; rank < 2; ++rank) {
          if (kRouted[step].left_out[static_cast<std::size_t>(rank)].contains(u)) continue;
          for (std::size_t i = 0; i < static_cast<std::size_t>(kSizes[u]); ++i)
            sum[i] += gradient_of(initial_value(u, i), u, i, step, rank);
        }
        rig.engine->finish_gradient(u);
      }
      // A loss scale of 2 divides as the mean over two ranks does.
      norms.push_back(
          rig.engine->step({.learning_rate = 0.01F, .loss_scale = 2.0F, .blob = {}}).grad_norm);
      std::vector<TypedArray>& params = expected.emplace_back();
      for (UnitId u = 0; u < kSizes.size(); ++u) {
        const auto got = HostDevice::view(rig.engine->acquire(u));
        TypedArray& values = params.emplace_back(got.dtype, static_cast<std::size_t>(kSizes[u]));
        std::ranges::copy(got.bytes.first(values.bytes.size()), values.bytes.begin());
        rig.engine->release(u);
      }
    }
  }
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(2, 1);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = config_of(directory, tiers);
    config.strategy.zero_stage = stage;
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 12 * kMiB);
    for (std::uint64_t step = 0; step < kRouted.size(); ++step) {
      const std::set<UnitId>& left_out = kRouted[step].left_out[static_cast<std::size_t>(rank)];
      backward(*rig.engine, left_out, step, rank, /*acquires_all=*/stage == 3);
      const StepResult result = rig.engine->step({.learning_rate = 0.01F, .blob = {}});
      EXPECT_EQ(result.grad_norm, norms[step]) << "rank " << rank << ", step " << step;
      expect_params(*rig.engine, expected[step], "among ranks");
    }
    rig.engine->make_durable();
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Stages, EngineOptionalRanks,
    ::testing::Combine(::testing::Values(0, 1, 2, 3),
                       ::testing::Values("params=host,grads=host,optimizer=nvme", "all=nvme",
                                         "all=device")),
    [](const auto& its) {
      const std::string placement = std::get<const char*>(its.param);
      const std::string name = placement == "all=nvme"     ? "Nvme"
                               : placement == "all=device" ? "Device"
                                                           : "Demo";
      return "Stage" + std::to_string(std::get<int>(its.param)) + name;
    });

TEST(EngineOptionalRanksOrder, LeavesFrozenUnitsToThemselves) {
  const ScratchDirectory directory;
  const ModelSpec model = model_of_experts();
  const auto runtimes = connected_runtimes(2, 1);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = config_of(directory, {.name = "", .placement = "all=host"});
    config.param_groups = {{.params = "unit2", .frozen = true}};
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 12 * kMiB);
    for (std::uint64_t step = 0; step < 2; ++step) {
      backward(*rig.engine, rank == 0 ? std::set<UnitId>{1, 2} : std::set<UnitId>{2, 4}, step,
               rank);
      EXPECT_EQ(rig.engine->step({.learning_rate = 0.01F, .blob = {}}).generation, step + 1);
    }
    rig.engine->make_durable();
  }));
}

TEST(EngineOptionalRanksOrder, IsOfTheModelWhateverEachRankFinishesFirst) {
  const ScratchDirectory directory;
  const ModelSpec model = model_of_experts();
  const auto runtimes = connected_runtimes(2, 1);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = config_of(directory, {.name = "", .placement = "all=host"});
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 12 * kMiB);
    for (std::uint64_t step = 0; step < 3; ++step) {
      // Both have all units, but rank 1 finishes its experts first, and the other way round.
      std::vector<UnitId> order{0, 3, 4, 2, 1};
      if (rank == 1) order = {1, 2, 4, 0, 3};
      for (const UnitId u : order) {
        const auto gradient = HostDevice::view(rig.engine->gradient(u));
        gradient[0] += 1;
        rig.engine->finish_gradient(u);
      }
      rig.engine->step({.learning_rate = 0.01F, .blob = {}});
    }
    rig.engine->make_durable();
  }));
}

}  // namespace engine_optional_test
}  // namespace ziggurat::testing
