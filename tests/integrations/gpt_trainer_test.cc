// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_trainer_test.cc: what does and does not change a step's bits, and what the
// trainer owes the engine.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "integrations/gpt/block.h"
#include "integrations/gpt/trainer.h"
#include "tests/integrations/gpt_fixture.h"

namespace ziggurat::gpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Several tiles each way, an odd context, two blocks of queries.
const ModelConfig kModel = parse_model("2x256x4");
constexpr RunShape kShape{.batch = 2, .accumulate = 2, .context = 150};

struct StepBits {
  std::vector<std::uint64_t> losses;
  std::vector<std::vector<std::byte>> params;
  bool operator==(const StepBits&) const = default;
};

StepBits train(const RunShape& shape, std::size_t threads, std::uint64_t steps = 2,
               DType dtype = DType::kBFloat16) {
  ModelConfig model = kModel;
  model.dtype = dtype;
  Training training(model, shape, threads);
  StepBits bits;
  for (std::uint64_t step = 0; step < steps; ++step)
    bits.losses.push_back(std::bit_cast<std::uint64_t>(training.step(step)));
  for (UnitId unit = 0; unit < training.engine.unit_count(); ++unit) {
    const auto params = training.engine.params(unit).bytes;
    bits.params.emplace_back(params.begin(), params.end());
  }
  return bits;
}

class GptTrainerBits : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(EveryType, GptTrainerBits,
                         ::testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(GptTrainerBits, ThreadsDoNotChangeThem) {
  const StepBits one = train(kShape, 1, 2, GetParam());
  EXPECT_EQ(train(kShape, 2, 2, GetParam()), one);
  EXPECT_EQ(train(kShape, 3, 2, GetParam()), one);
}

TEST_P(GptTrainerBits, CheckpointingDoesNotChangeThem) {
  RunShape off = kShape;
  off.checkpointing = ActivationCheckpointing::kOff;
  EXPECT_EQ(train(off, 2, 2, GetParam()), train(kShape, 2, 2, GetParam()));
}

TEST_P(GptTrainerBits, TheSimdTargetDoesNotChangeThem) {
  const StepBits best = train(kShape, 2, 1, GetParam());
  kernels::force_simd_target(kernels::simd_targets().back());
  const StepBits narrowest = train(kShape, 2, 1, GetParam());
  kernels::force_simd_target("");
  EXPECT_EQ(narrowest, best);
}

// The same training in three types. Seen: a loss of 1.8506 in fp32, 1.8502 in bf16, 1.8508 in fp16.
TEST(GptTrainer, LearnsAlikeInEveryType) {
  const auto loss = [](DType dtype, float loss_scale) {
    ModelConfig model = parse_model("2x64x4");
    model.dtype = dtype;
    Training training(model, {.batch = 2, .accumulate = 2, .context = 64}, 2);
    double last = 0;
    for (std::uint64_t step = 0; step < 40; ++step) {
      last = training.trainer.forward_backward(training.batches(step), loss_scale);
      const StepResult result =
          training.engine.step({.learning_rate = 3e-3F, .loss_scale = loss_scale, .blob = {}});
      EXPECT_FALSE(result.skipped) << step;
    }
    return last;
  };
  const double exact = loss(DType::kFloat32, 1);
  EXPECT_LT(exact, 3) << "it learned";
  EXPECT_NEAR(loss(DType::kBFloat16, 1), exact, 0.005 * exact);
  EXPECT_NEAR(loss(DType::kFloat16, 1024), exact, 0.005 * exact);
}

// A power of two moves the exponents and nothing else, where nothing overflows or gets lost.
TEST(GptTrainer, ALossScaleScalesTheGradientsAndNotTheLoss) {
  ModelConfig model = parse_model("1x64x2");
  model.dtype = DType::kFloat32;
  const RunShape shape{.batch = 1, .accumulate = 2, .context = 32};
  Training plain(model, shape, 1);
  Training scaled(model, shape, 1);
  const double loss = plain.trainer.forward_backward(plain.batches(0));
  EXPECT_EQ(scaled.trainer.forward_backward(plain.batches(0), 256), loss);
  for (UnitId unit = 0; unit < plain.engine.unit_count(); ++unit) {
    const auto one = plain.engine.finished_gradient(unit);
    const auto other = scaled.engine.finished_gradient(unit);
    for (std::size_t i = 0; i < one.size(); ++i) ASSERT_EQ(other[i], 256 * one[i]);
  }
}

TEST(GptTrainer, AnOverflowInFp16ReachesTheNorm) {
  ModelConfig model = parse_model("2x64x2");
  model.dtype = DType::kFloat16;
  Training training(model, {.batch = 1, .accumulate = 1, .context = 32}, 2);
  constexpr float kTooMuch = 0x1p40F;
  training.trainer.forward_backward(training.batches(0), kTooMuch);
  const StepResult result =
      training.engine.step({.learning_rate = 1e-3F, .loss_scale = kTooMuch, .blob = {}});
  EXPECT_TRUE(result.skipped);
  EXPECT_FALSE(std::isfinite(result.grad_norm));
}

TEST(GptTrainer, Learns) {
  Training training(parse_model("2x64x4"), {.batch = 2, .accumulate = 2, .context = 64}, 2);
  const double before = training.step(0, 3e-3F);
  EXPECT_NEAR(before, std::log(256.0), 0.2) << "an untrained model knows nothing";
  double after = 0;
  for (std::uint64_t step = 1; step < 60; ++step) after = training.step(step, 3e-3F);
  // The text draws each byte from five: log 5 = 1.61 is the least.
  EXPECT_LT(after, 2.4);
  EXPECT_GT(after, 1.5);
}

TEST(GptTrainer, AcquiresEachUnitOncePerPassWhateverIsAccumulated) {
  for (const std::int64_t accumulate : {1, 4}) {
    Training training(parse_model("3x32x2"), {.batch = 1, .accumulate = accumulate, .context = 16},
                      2);
    training.step(0);
    EXPECT_THAT(training.engine.acquisitions(), ElementsAre(0, 1, 2, 3, 0, 3, 2, 1));
    EXPECT_EQ(training.engine.acquired(), 0);
  }
}

TEST(GptTrainer, AccumulatingIsTheMeanOverAllMicroBatches) {
  // One step of two micro-batches, and each of them alone: losses and gradients average.
  const ModelConfig model = parse_model("1x64x2");
  RunShape shape{.batch = 1, .accumulate = 2, .context = 32};
  Training both(model, shape, 1);
  const auto batches = both.batches(0);
  const double loss = both.trainer.forward_backward(batches);
  shape.accumulate = 1;
  std::vector<std::vector<float>> sums;
  double losses = 0;
  for (const Batch& batch : batches) {
    Training alone(model, shape, 1);
    losses += alone.trainer.forward_backward(std::span(&batch, 1)) / 2;
    for (UnitId unit = 0; unit < alone.engine.unit_count(); ++unit) {
      const auto gradient = alone.engine.finished_gradient(unit);
      if (sums.size() <= unit) sums.emplace_back(gradient.size());
      for (std::size_t i = 0; i < gradient.size(); ++i) sums[unit][i] += gradient[i] / 2;
    }
  }
  EXPECT_NEAR(loss, losses, 1e-6);
  for (UnitId unit = 0; unit < sums.size(); ++unit) {
    const auto gradient = both.engine.finished_gradient(unit);
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      error += std::pow(static_cast<double>(gradient[i] - sums[unit][i]), 2);
      norm += std::pow(static_cast<double>(gradient[i]), 2);
    }
    EXPECT_LT(error, 1e-8 * norm);  // scaling by a power of two is exact in bf16: only the order of
                                    // fp32 sums differs
  }
}

TEST(GptTrainer, EvaluateNeitherNeedsNorLeavesGradients) {
  Training training(kModel, kShape, 2);
  auto batches = training.batches(0);
  const double first = training.trainer.evaluate(batches);
  EXPECT_EQ(training.trainer.evaluate(batches), first);
  batches.push_back(batches.front());  // more than accumulate: several passes
  const double three = training.trainer.evaluate(batches);
  const double alone = training.trainer.evaluate(std::span(batches).first(1));
  EXPECT_NEAR(three, (2 * first + alone) / 3, 1e-6);
  EXPECT_EQ(training.trainer.forward_backward(training.batches(0)), first);
}

TEST(GptTrainer, StaysInTheWorkspaceItNamed) {
  const std::uint64_t bytes = Trainer::workspace_bytes(kModel, kShape, 2);
  Reactor reactor;
  WorkerPool workers({.threads = 2, .cpus = {}, .trace = nullptr});
  testing::RamEngine engine(make_spec(kModel), {}, 1.0F, make_initializer(kModel, 1));
  const auto device = HostDevice::create(reactor, bytes + 8192);
  const Trainer trainer(engine, *device, workers, kModel, kShape);
  EXPECT_GE(device->account().used_bytes(Purpose::kActivations), bytes);
  EXPECT_LE(device->account().used_bytes(), bytes + 8192);
}

// 160 MiB, less three blocks of parameters and two of accumulators, is 65; without bf16 products,
// too.
TEST(GptTrainer, TheDemonstrationFitsItsBudget) {
  const ModelConfig small = parse_model("gpt2-small");
  const RunShape shape{.batch = 2, .accumulate = 4, .context = 256};
  EXPECT_LT(Trainer::workspace_bytes(small, shape, 2), (has_bf16_products() ? 56 : 62) * kMiB);
}

TEST(GptTrainer, RefusesWhatDoesNotFit) {
  Training training(parse_model("1x32x2"), {.batch = 1, .accumulate = 2, .context = 16}, 1);
  const auto code_and_text = [](const std::function<void()>& action) -> std::string {
    try {
      action();
    } catch (const Error& error) {
      return std::string(to_string(error.code())) + ": " + error.what();
    }
    return "accepted";
  };
  const std::string invalid(to_string(ErrorCode::kInvalidArgument));
  auto batches = training.batches(0);
  EXPECT_THAT(
      code_and_text([&] { training.trainer.forward_backward(std::span(batches).first(1)); }),
      HasSubstr(invalid + ": 1 micro-batches were given, but a step has 2"));
  batches[1].inputs.pop_back();
  EXPECT_THAT(code_and_text([&] { training.trainer.forward_backward(batches); }),
              HasSubstr("15 inputs"));
  EXPECT_THAT(code_and_text([&] { training.trainer.evaluate({}); }), HasSubstr(invalid));
  EXPECT_THAT(code_and_text([&] { training.trainer.sample("", {}); }), HasSubstr("prompt"));
  for (const RunShape& bad : {RunShape{.batch = 0}, RunShape{.accumulate = 0},
                              RunShape{.context = 0}, RunShape{.context = 1025}}) {
    EXPECT_THAT(code_and_text([&] { Trainer::workspace_bytes(kModel, bad, 1); }),
                HasSubstr(invalid));
  }
  Reactor reactor;
  const auto small = HostDevice::create(reactor, 65536);
  EXPECT_THAT(code_and_text([&] {
                Trainer(training.engine, *small, training.workers, training.model, training.shape);
              }),
              HasSubstr(std::string(to_string(ErrorCode::kResourceExhausted))));
}

TEST(GptSample, IsAFunctionOfPromptSeedAndTemperature) {
  const auto draw = [](std::size_t threads, const SampleOptions& options) {
    Training training(parse_model("2x64x4"), {.batch = 1, .accumulate = 1, .context = 80}, threads);
    return training.trainer.sample("In the beginning", options);
  };
  // Longer than the context: the window slides.
  const std::string text = draw(1, {.count = 90, .temperature = 1.0F, .seed = 5, .on_byte = {}});
  EXPECT_EQ(text.size(), 16U + 90U);
  EXPECT_EQ(text.substr(0, 16), "In the beginning");
  EXPECT_EQ(draw(2, {.count = 90, .temperature = 1.0F, .seed = 5, .on_byte = {}}), text);
  EXPECT_NE(draw(1, {.count = 90, .temperature = 1.0F, .seed = 6, .on_byte = {}}), text);
  EXPECT_EQ(draw(1, {.count = 9, .temperature = 0.0F, .seed = 1, .on_byte = {}}),
            draw(1, {.count = 9, .temperature = 0.0F, .seed = 2, .on_byte = {}}));
  std::string heard;
  draw(1, {.count = 5, .temperature = 1.0F, .seed = 5, .on_byte = [&](char c) {
             heard.push_back(c);
           }});
  EXPECT_EQ(heard, text.substr(16, 5));
}

TEST(GptBlock, ARowDependsOnNoLaterRow) {
  constexpr std::int64_t kContext = 140;
  const ModelConfig model = parse_model("1x64x4");
  const Block block(model, {.batch = 1, .context = kContext}, 2);
  WorkerPool workers({.threads = 2, .cpus = {}, .trace = nullptr});
  std::vector<float> values(make_spec(model).units[1].count());
  make_initializer(model, 1)(1, 0, values);
  std::vector<bf16> params;
  for (const float v : values) params.push_back(float_to_bf16(v * 5));

  const auto output = [&](const std::vector<bf16>& x) {
    std::vector<std::byte> memory;
    std::vector<WorkerScratch> scratch(2);
    BlockActivations activations{};
    const WideElements wide = Block::wide_scratch(model, {.batch = 1, .context = kContext});
    for (int pass = 0; pass < 2; ++pass) {
      Carver carver(pass == 0 ? nullptr : memory.data());
      activations = BlockActivations::carve(model, RowShare::whole(kContext), carver);
      for (WorkerScratch& own : scratch) {
        own.tile = carver.take<float>(TiledMatmul::tile_elements_max());
        own.wide = {{carver.take<float>(wide.a), static_cast<std::size_t>(wide.a)},
                    {carver.take<float>(wide.b), static_cast<std::size_t>(wide.b)}};
        Attention::carve(model, kContext, carver, own);
      }
      memory.resize(carver.used_bytes());
    }
    std::vector<bf16> y(x.size());
    workers.run_team([&](Team& team) {
      block.forward(team, scratch,
                    {.params = params.data(),
                     .x = x.data(),
                     .activations = activations,
                     .keep = Block::Keep::kNothing,
                     .y = y.data()});
    });
    return y;
  };

  std::vector<float> noise(static_cast<std::size_t>(kContext * model.width));
  fill_normal(3, 0, noise);
  std::vector<bf16> x;
  for (const float v : noise) x.push_back(float_to_bf16(v));
  const std::vector<bf16> y = output(x);
  for (const std::int64_t changed : {1, 63, 127, 128, 139}) {
    std::vector<bf16> other = x;
    for (std::int64_t i = changed * model.width; i < kContext * model.width; ++i)
      other[static_cast<std::size_t>(i)] ^= 0x8000;
    const std::vector<bf16> z = output(other);
    const auto rows_before = static_cast<std::ptrdiff_t>(changed * model.width);
    EXPECT_TRUE(std::equal(y.begin(), y.begin() + rows_before, z.begin()))
        << "row " << changed << " reached back";
    EXPECT_FALSE(std::equal(y.begin() + rows_before, y.end(), z.begin() + rows_before));
  }
}

}  // namespace
}  // namespace ziggurat::gpt
