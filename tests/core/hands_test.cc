// SPDX-License-Identifier: Apache-2.0
// tests/core/hands_test.cc: a trainer of units and one that lends its parameters have the same bits
// after the same steps: units of several types, a frozen one, and units without a gradient; alone,
// and with two ranks against one that is lent their sum.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/engine/lent_engine.h"
#include "tests/core/engine_harness.h"
#include "tests/core/ranks_harness.h"
#include "tests/support/typed_array.h"
#include "tiers/device/host_device.h"

namespace ziggurat::testing {
namespace hands_test {

using enum StateFormat;

constexpr std::array<std::int64_t, 5> kCounts{20'000, 16'384, 50'000, 120'000, 300};
constexpr UnitId kUnits = kCounts.size();
constexpr UnitId kFrozen = 4;
/// What has no gradient, by step and rank.
const std::vector<std::array<std::set<UnitId>, 2>> kLeftOut{
    {{{}, {}}}, {{{1}, {3}}}, {{{1, 3}, {1}}}, {{{1, 3}, {1, 3}}}, {{{}, {}}}};

/// One type, or each unit its own.
ModelSpec model_of(bool mixed) {
  ModelSpec model{.name = "hands", .units = {}, .dtype = DType::kBFloat16};
  for (UnitId u = 0; u < kUnits; ++u) {
    const std::string name = "unit" + std::to_string(u);
    model.units.push_back({.name = name,
                           .params = {{.name = name, .shape = {kCounts[u]}}},
                           .optional = u == 1 || u == 3});
    if (mixed && u % 2 == 1) model.units.back().dtype = DType::kFloat32;
  }
  return model;
}

/// Values that every type has, so that masters made from parameters are those that were given.
float first_value(UnitId unit, std::uint64_t element) {
  return std::round(initial_value(unit, element) * 64.0F) / 64.0F;
}
void first_values(UnitId unit, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first_value(unit, first + i);
}

/// A multiple of 1/256 below 1/8: exact in every type, and so is a sum of two.
float gradient_at(UnitId unit, std::size_t i, std::uint64_t step, int rank) {
  const std::size_t mixed = i * (31 + 2 * static_cast<std::size_t>(rank)) + step * 7 + unit * 3;
  return (static_cast<float>(mixed % 61) - 30.0F) / 256.0F;
}

EngineConfig config_of(const ScratchDirectory& directory, StateFormat format,
                       const char* placement) {
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(placement);
  config.optimizer.state.format = format;
  config.optimizer.state_rounding = config.optimizer.param_rounding = Rounding::kNearest;
  config.clip_norm = 0;
  return config;
}

/// The steps of an engine that is lent the model, with what the first `ranks` ranks have as
/// gradients, added in their order: the parameters after each step.
std::vector<std::vector<TypedArray>> lent_steps(ModelSpec model, StateFormat format, int ranks) {
  const ScratchDirectory directory;
  const auto runtime = Runtime::create({.threads = 2, .trace_path = ""});
  const auto device = HostDevice::create(runtime->reactor, 12 * kMiB);
  std::vector<TypedArray> params;
  std::vector<TypedSpan<std::byte>> lent;
  for (UnitId u = 0; u < kUnits; ++u) {
    UnitSpec& unit = model.units[u];
    unit.params[0].group = u;
    if (u == kFrozen) {
      unit.params[0].frozen = true;
      unit.params[0].streamed = 0;
    }
    TypedArray& values = params.emplace_back(unit.dtype.value_or(model.dtype), unit.count());
    for (std::size_t i = 0; i < values.count(); ++i) values.set(i, first_value(u, i));
  }
  for (TypedArray& values : params) lent.push_back(values.span());
  const auto engine =
      LentEngine::open(model, config_of(directory, format, "params=host,grads=host,optimizer=nvme"),
                       *runtime, lent, device.get());
  std::vector<std::vector<TypedArray>> after;
  for (std::uint64_t step = 0; step < kLeftOut.size(); ++step) {
    std::vector<TypedArray> sums(kUnits);
    std::vector<TypedSpan<const std::byte>> gradients(kUnits);
    for (UnitId u = 0; u < kFrozen; ++u) {
      for (int rank = 0; rank < ranks; ++rank) {
        if (kLeftOut[step][static_cast<std::size_t>(rank)].contains(u)) continue;
        if (sums[u].bytes.empty()) sums[u] = TypedArray(DType::kFloat32, params[u].count());
        for (std::size_t i = 0; i < sums[u].count(); ++i)
          sums[u].set(i, sums[u].at(i) + gradient_at(u, i, step, rank));
      }
      if (!sums[u].bytes.empty()) gradients[u] = sums[u].span();
    }
    const std::vector<GroupStep> groups(kUnits, {.learning_rate = 0.01F,
                                                 .beta1 = 0.9F,
                                                 .beta2 = 0.95F,
                                                 .eps = 1e-8F,
                                                 .weight_decay = 0.1F,
                                                 .grad_scale = 1.0F / static_cast<float>(ranks),
                                                 .steps = step + 1});
    StepOptions options{.blob = {}};
    options.groups = groups;
    engine->step(gradients, options);
    engine->wait_all_updated();
    after.push_back(params);
  }
  return after;
}

/// The steps of one rank's engine of units; compares its parameters with `expected` after each.
void unit_steps(Engine& engine, int rank, bool all_acquire,
                const std::vector<std::vector<TypedArray>>& expected) {
  for (std::uint64_t step = 0; step < kLeftOut.size(); ++step) {
    for (UnitId u = kUnits; u-- > 0;) {
      if (all_acquire) {
        engine.acquire(u);
        engine.release(u);
      }
      if (kLeftOut[step][static_cast<std::size_t>(rank)].contains(u)) continue;
      const auto gradient = HostDevice::view(engine.gradient(u));
      for (std::size_t i = 0; i < static_cast<std::size_t>(kCounts[u]); ++i)
        gradient[i] += gradient_at(u, i, step, rank);
      engine.finish_gradient(u);
    }
    engine.step({.learning_rate = 0.01F, .blob = {}});
    for (UnitId u = 0; u < kUnits; ++u) {
      const auto got = HostDevice::view(engine.acquire(u));
      const TypedArray& wanted = expected[step][u];
      EXPECT_EQ(got.dtype, wanted.dtype);
      EXPECT_TRUE(std::ranges::equal(got.bytes.first(wanted.bytes.size()), wanted.bytes))
          << "rank " << rank << ", step " << step << ", unit " << u;
      engine.release(u);
    }
  }
  engine.make_durable();
}

EngineConfig unit_config(const ScratchDirectory& directory, StateFormat format,
                         const char* placement) {
  EngineConfig config = config_of(directory, format, placement);
  config.param_groups = {{.params = "unit4", .frozen = true}};
  return config;
}

class Hands : public ::testing::TestWithParam<std::tuple<StateFormat, const char*>> {};

TEST_P(Hands, HaveTheSameBits) {
  const auto& [format, placement] = GetParam();
  const ModelSpec model = model_of(/*mixed=*/format != kSplit);
  const ScratchDirectory directory;
  const auto runtime = Runtime::create({.threads = 2, .trace_path = ""});
  const auto device = HostDevice::create(runtime->reactor, 12 * kMiB);
  const auto engine = Engine::open(model, unit_config(directory, format, placement), *runtime,
                                   *device, first_values);
  unit_steps(*engine, 0, false, lent_steps(model, format, 1));
}

TEST_P(Hands, HaveTheSameBitsOnTwoRanksAsOneThatIsLentTheirSum) {
  const auto& [format, placement] = GetParam();
  const ModelSpec model = model_of(/*mixed=*/format != kSplit);
  const std::vector<std::vector<TypedArray>> expected = lent_steps(model, format, 2);
  for (int stage = 0; stage <= 3; ++stage) {
    const ScratchDirectory directory;
    const auto runtimes = connected_runtimes(2, 1);
    expect_none(run_ranks(2, [&, in = placement, as = format](int rank) {
      EngineConfig config = unit_config(directory, as, in);
      config.strategy.zero_stage = stage;
      Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
      const auto device = HostDevice::create(runtime.reactor, 12 * kMiB);
      const auto engine = Engine::open(model, config, runtime, *device, first_values);
      unit_steps(*engine, rank, /*all_acquire=*/stage == 3, expected);
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Everywhere, Hands,
    ::testing::Combine(::testing::Values(kFp32, kSplit, kBf16Moments, k8Bit),
                       ::testing::Values("params=host,grads=host,optimizer=nvme", "all=nvme",
                                         "all=host")),
    [](const auto& its) {
      std::string format(to_string(std::get<StateFormat>(its.param)));
      std::erase(format, '-');
      const std::string placement = std::get<const char*>(its.param);
      return format + (placement == "all=nvme"   ? "AllNvme"
                       : placement == "all=host" ? "AllHost"
                                                 : "Demo");
    });

}  // namespace hands_test
}  // namespace ziggurat::testing
