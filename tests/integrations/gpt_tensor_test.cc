// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_tensor_test.cc: ranks that divide every layer against one that has the
// whole model: the same initial values, the same gradients to fp32's rounding, the same bits of
// what they share.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <barrier>
#include <cmath>

#include "core/plan/traffic.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/tensor_traffic.h"
#include "tests/core/ranks_harness.h"
#include "tests/integrations/gpt_fixture.h"

namespace ziggurat::gpt {
namespace {

using testing::connected_runtimes;
using testing::expect_none;
using testing::RamEngine;
using testing::run_ranks;

constexpr std::uint64_t kSeed = 1;

ModelConfig model_of(const char* text, DType dtype, TensorPart part = {}) {
  ModelConfig model = parse_model(text);
  model.context_max = 48;
  model.dtype = dtype;
  model.part = part;
  return model;
}

/// What a step gives: the loss, and every unit's gradient.
struct Step {
  double loss = 0;
  std::vector<std::vector<float>> gradients;
};

std::vector<Batch> batches_of(const RunShape& shape) {
  std::vector<Batch> batches;
  for (std::int64_t k = 0; k < shape.accumulate; ++k)
    batches.push_back(make_batch(shape, 1000 + static_cast<std::uint64_t>(k)));
  return batches;
}

Step step_of(RamEngine& engine, Trainer& trainer, const RunShape& shape) {
  Step step;
  step.loss = trainer.forward_backward(batches_of(shape));
  for (UnitId unit = 0; unit < engine.unit_count(); ++unit) {
    const std::span<const float> gradient = engine.finished_gradient(unit);
    step.gradients.emplace_back(gradient.begin(), gradient.end());
  }
  return step;
}

Step whole_step(const char* text, DType dtype, RunShape shape) {
  shape.sequence_parallel = false;
  Training training(model_of(text, dtype), shape, 1, kSeed);
  return step_of(training.engine, training.trainer, shape);
}

/// Payload that this rank has sent.
std::uint64_t sent_bytes(Runtime& runtime) {
  return runtime.reactor.block_on([](Runtime& its) -> Task<std::uint64_t> {
    const Traffic traffic = its.ranks->traffic();
    co_return traffic.same_host.payload_bytes + traffic.other_hosts.payload_bytes;
  }(runtime));
}

struct Divided {
  std::vector<Step> ranks;
  std::vector<std::uint64_t> sent_bytes;
};

/// The same step on every one of `count` ranks.
Divided divided_step(const char* text, DType dtype, const RunShape& shape, int count,
                     std::size_t threads = 1) {
  const auto runtimes = connected_runtimes(count, threads);
  Divided divided;
  divided.ranks.resize(static_cast<std::size_t>(count));
  divided.sent_bytes.resize(static_cast<std::size_t>(count));
  std::barrier<> all_done(count);
  const auto errors = run_ranks(count, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Runtime& runtime = *runtimes[index];
    TensorRanks ranks(runtime, place_of(rank, count, count));
    const ModelConfig model = model_of(text, dtype, ranks.part());
    const auto device = HostDevice::create(runtime.reactor,
                                           Trainer::workspace_bytes(model, shape, threads) + 65536);
    RamEngine engine(make_spec(model), {}, 1.0F, make_initializer(model, kSeed));
    Trainer trainer(engine, *device, *runtime.workers, model, shape, &ranks);
    divided.ranks[index] = step_of(engine, trainer, shape);
    divided.sent_bytes[index] = sent_bytes(runtime);
    EXPECT_EQ(engine.acquired(), 0);
    all_done.arrive_and_wait();
  });
  expect_none(errors);
  return divided;
}

/// Elements of a parameter that parts have, put where the whole has them.
std::vector<float> put_together(const ModelConfig& model, const std::vector<Step>& ranks,
                                UnitId unit) {
  std::vector<float> whole(make_spec(model.whole()).units[unit].count(), std::nanf(""));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const TensorPart part{static_cast<int>(rank), static_cast<int>(ranks.size())};
    ModelConfig its = model;
    its.part = part;
    const UnitSpec spec = make_spec(its).units[unit];
    for_each_run(spec, part, 0, spec.count(), [&](const PartRun& run) {
      std::copy_n(&ranks[rank].gradients[unit][run.begin], run.count, &whole[run.whole_begin]);
    });
  }
  return whole;
}

struct World {
  const char* name;
  const char* model = "2x64x4";
  int ranks = 2;
  RunShape shape{.batch = 2, .accumulate = 2, .context = 24};
  std::size_t threads = 1;
};
void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

class GptTensor : public ::testing::TestWithParam<World> {
 protected:
  /// The worst tensor's: the norm of its difference over its own norm.
  static double worst_error(const std::vector<Step>& ranks, const Step& whole, DType dtype) {
    const ModelConfig model = model_of(GetParam().model, dtype);
    const ModelSpec spec = make_spec(model);
    double worst = 0;
    for (UnitId unit = 0; unit < spec.units.size(); ++unit) {
      const std::vector<float> gradient = put_together(model, ranks, unit);
      std::size_t at = 0;
      for (const ParamSpec& param : spec.units[unit].params) {
        double difference = 0;
        double norm = 0;
        for (std::size_t i = at; i < at + param.count(); ++i) {
          const auto expected = static_cast<double>(whole.gradients[unit][i]);
          const double error = static_cast<double>(gradient[i]) - expected;
          difference += error * error;
          norm += expected * expected;
        }
        EXPECT_GT(norm, 0) << param.name;
        EXPECT_LT(difference, norm) << param.name;
        worst = std::max(worst, std::sqrt(difference / norm));
        at += param.count();
      }
    }
    return worst;
  }
};

// Products are cut, and so rounded, at other places: in fp32 5e-7 of a tensor's norm was seen. In
// bf16 each rank's part of a sum is rounded before they are added: 0.7 % was seen, as much as one
// rank's gradient misses the exact one by (tests/integrations/gpt_gradient_test.cc).
TEST_P(GptTensor, HasTheGradientsOfOneRank) {
  const World& world = GetParam();
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::kFloat32, 2e-6}, std::pair{DType::kBFloat16, 0.02}}) {
    const Step whole = whole_step(world.model, dtype, world.shape);
    const Divided divided =
        divided_step(world.model, dtype, world.shape, world.ranks, world.threads);
    for (const Step& step : divided.ranks) {
      EXPECT_EQ(step.loss, divided.ranks[0].loss);
      EXPECT_NEAR(step.loss, whole.loss, tolerance / 10 * whole.loss);
    }
    const double error = worst_error(divided.ranks, whole, dtype);
    RecordProperty(std::string(to_string(dtype)), fmt::format("{:.2g}", error));
    EXPECT_LT(error, tolerance) << to_string(dtype);
  }
}

TEST_P(GptTensor, HasTheSameBitsOfWhatIsNotDivided) {
  const World& world = GetParam();
  const Divided divided =
      divided_step(world.model, DType::kBFloat16, world.shape, world.ranks, world.threads);
  const ModelSpec spec = make_spec(model_of(world.model, DType::kBFloat16, {.ranks = world.ranks}));
  for (UnitId unit = 0; unit < spec.units.size(); ++unit) {
    for (const ElementRun& run : shared_runs(spec.units[unit])) {
      const auto shared = [&](const Step& step) {
        return std::span(step.gradients[unit]).subspan(run.begin, run.count());
      };
      for (const Step& step : divided.ranks)
        EXPECT_TRUE(std::ranges::equal(shared(step), shared(divided.ranks[0]))) << unit;
    }
  }
}

TEST_P(GptTensor, SendsWhatWasPlanned) {
  const World& world = GetParam();
  const ModelConfig model = model_of(world.model, DType::kBFloat16, {.ranks = world.ranks});
  const Divided divided =
      divided_step(world.model, DType::kBFloat16, world.shape, world.ranks, world.threads);
  for (const std::uint64_t sent : divided.sent_bytes)
    EXPECT_EQ(sent, tensor_traffic(model, world.shape).total());
}

constexpr auto kOff = ActivationCheckpointing::kOff;
INSTANTIATE_TEST_SUITE_P(
    Worlds, GptTensor,
    ::testing::Values(
        World{.name = "TwoRanks"}, World{.name = "TwoRanksOfTwoWorkers", .threads = 2},
        World{.name = "FourRanks", .ranks = 4},
        World{.name = "TwoRanksThatKeepActivations",
              .shape = {.batch = 2, .accumulate = 2, .context = 24, .checkpointing = kOff}},
        World{.name = "TwoRanksDivideRows",
              .shape = {.batch = 2, .accumulate = 2, .context = 24, .sequence_parallel = true}},
        World{.name = "FourRanksDivideRowsOfOneSequence",
              .ranks = 4,
              .shape = {.batch = 1, .accumulate = 1, .context = 36, .sequence_parallel = true}},
        World{.name = "FourRanksDivideRowsAndKeepActivations",
              .ranks = 4,
              .shape = {.batch = 2,
                        .accumulate = 2,
                        .context = 10,
                        .checkpointing = kOff,
                        .sequence_parallel = true}}),
    [](const auto& one) { return std::string(one.param.name); });

/// What rank 0 of 2 data-parallel x 2 tensor-parallel ranks sends in a step, on average.
double sent_in_a_step(const ModelConfig& model, const RunShape& shape, int stage) {
  constexpr int kRanks = 4;
  constexpr std::uint64_t kSteps = 2;
  const auto runtimes = connected_runtimes(kRanks, 1);
  const testing::ScratchDirectory directory;
  EngineConfig config = testing::small_config(directory.path());
  config.tensor_parallel = model.part.ranks;
  config.strategy.zero_stage = stage;
  config.host_budget_bytes = 32 * kMiB;
  config.max_reuse_distance = 0;  // a unit goes after each use
  config.trainer_device_bytes = Trainer::workspace_bytes(model, shape, 1);
  double sent = 0;
  std::barrier<> all_done(kRanks);
  const auto errors = run_ranks(kRanks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    TensorRanks ranks(runtime, place_of(rank, kRanks, model.part.ranks));
    ModelConfig part = model;
    part.part = ranks.part();
    const auto device = HostDevice::create(runtime.reactor, 32 * kMiB);
    const auto engine =
        Engine::open(make_spec(part), config, runtime, *device, make_initializer(part, kSeed));
    Trainer trainer(*engine, *device, *runtime.workers, part, shape, &ranks);
    const auto steps = [&](std::uint64_t count) {
      for (std::uint64_t step = 0; step < count; ++step) {
        trainer.forward_backward(batches_of(shape));
        engine->step({.learning_rate = 1e-3F, .blob = {}});
      }
      engine->make_durable();
      all_done.arrive_and_wait();
      return sent_bytes(runtime);
    };
    const std::uint64_t before = steps(1);
    const std::uint64_t after = steps(kSteps);
    if (rank == 0) sent = static_cast<double>(after - before) / kSteps;
  });
  expect_none(errors);
  return sent;
}

// Norms and agreements come on top, 8 bytes a tile and some words.
TEST(GptTensorTraffic, OfWholeStepsIsWhatWasPlannedInEveryStage) {
  for (const bool sequence_parallel : {false, true}) {
    const ModelConfig model = model_of("2x64x4", DType::kBFloat16, {.ranks = 2});
    const RunShape shape{
        .batch = 2, .accumulate = 2, .context = 24, .sequence_parallel = sequence_parallel};
    const TensorTraffic tensor = tensor_traffic(model, shape);
    for (const int stage : {0, 2, 3}) {
      const TrafficRequest request{.model = model_size(make_spec(model.whole()), 2),
                                   .recipe = {},
                                   .strategy = resolve({.zero_stage = stage}, 2),
                                   .dp_ranks_per_node = 2,
                                   .tensor = {.forward = tensor.forward_bytes,
                                              .again = tensor.again_bytes,
                                              .backward = tensor.backward_bytes,
                                              .shared_gradients = tensor.shared_gradient_bytes},
                                   .tensor_ranks_per_node = 2};
      const auto planned = static_cast<double>(step_traffic(request).sent().total());
      const double sent = sent_in_a_step(model, shape, stage);
      EXPECT_GE(sent, planned) << "stage " << stage;
      EXPECT_LE(sent, 1.005 * planned) << "stage " << stage;
    }
  }
}

// Which rank has which rows changes no sum, only that of gradients over rows.
TEST(GptTensorRows, DividedOrNotGiveTheSameLossAndMatrices) {
  RunShape shape{.batch = 2, .accumulate = 2, .context = 24};
  const Step whole_rows = divided_step("2x64x4", DType::kBFloat16, shape, 2).ranks[0];
  shape.sequence_parallel = true;
  const Step own_rows = divided_step("2x64x4", DType::kBFloat16, shape, 2).ranks[0];
  EXPECT_EQ(whole_rows.loss, own_rows.loss);
  const ModelConfig model = model_of("2x64x4", DType::kBFloat16, {.ranks = 2});
  const ModelSpec spec = make_spec(model);
  for (UnitId unit = 0; unit < spec.units.size(); ++unit) {
    std::size_t at = 0;
    for (const ParamSpec& param : spec.units[unit].params) {
      const auto of = [&](const Step& step) {
        return std::span(step.gradients[unit]).subspan(at, param.count());
      };
      const bool same = std::ranges::equal(of(whole_rows), of(own_rows));
      EXPECT_TRUE(same || param.tp_dim < 0) << param.name;
      at += param.count();
    }
  }
}

TEST(GptTensorModel, PartsBeginWithTheValuesOfTheWhole) {
  const ModelConfig whole = model_of("3x96x6", DType::kFloat32);
  const ModelSpec spec = make_spec(whole);
  const Initializer of_whole = make_initializer(whole, kSeed);
  for (int rank = 0; rank < 2; ++rank) {
    const TensorPart part{rank, 2};
    const ModelConfig its = model_of("3x96x6", DType::kFloat32, part);
    const ModelSpec part_spec = make_spec(its);
    EXPECT_EQ(part_spec.name, spec.name);
    for (UnitId unit = 0; unit < spec.units.size(); ++unit) {
      std::vector<float> expected(spec.units[unit].count());
      of_whole(unit, 0, expected);
      std::vector<float> values(part_spec.units[unit].count());
      make_initializer(its, kSeed)(unit, 0, values);
      for_each_run(part_spec.units[unit], part, 0, values.size(), [&](const PartRun& run) {
        EXPECT_TRUE(std::equal(&values[run.begin], &values[run.begin] + run.count,
                               &expected[run.whole_begin]));
      });
    }
  }
}

TEST(GptTensorModel, WhatDoesNotDivideIsRefusedWithTheArithmetic) {
  const auto why = [](const char* model, int ranks) -> std::string {
    try {
      require_divisible(parse_model(model), ranks);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(why("2x64x4", 4), "");
  EXPECT_THAT(why("2x96x6", 4), ::testing::HasSubstr("6 heads, which 4 ranks cannot divide "
                                                     "evenly: 6 / 4 = 1 each, with 2 left over"));
  EXPECT_THAT(why("2x32x4", 4), ::testing::HasSubstr("32 columns"));
  const ModelConfig model = model_of("2x64x4", DType::kBFloat16, {.ranks = 2});
  const RunShape shape{.batch = 3, .accumulate = 1, .context = 5, .sequence_parallel = true};
  try {
    Trainer::workspace_bytes(model, shape, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("batch 3 x context 5 = 15 rows"));
  }
}

// What rows are divided for: block inputs, which are most of a trainer's memory.
TEST(GptTensorModel, DividedRowsTakeLessMemory) {
  ModelConfig model = model_of("24x1024x16", DType::kBFloat16, {.ranks = 2});
  model.context_max = 1024;
  RunShape shape{.batch = 2, .accumulate = 4, .context = 512};
  const std::uint64_t whole = Trainer::workspace_bytes(model.whole(), shape, 1);
  const std::uint64_t divided = Trainer::workspace_bytes(model, shape, 1);
  shape.sequence_parallel = true;
  const std::uint64_t rows_too = Trainer::workspace_bytes(model, shape, 1);
  const std::uint64_t stream = 25 * 4 * 1024 * 1024 * sizeof(bf16);
  EXPECT_LT(divided, whole);
  EXPECT_GT(divided, stream);
  EXPECT_LT(rows_too, divided - stream / 2 + 4 * kMiB);
}

}  // namespace
}  // namespace ziggurat::gpt
