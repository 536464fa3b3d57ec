// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_formats_test.cc: every optimizer and format of state through the engine: the
// bits of plain arrays wherever the state is, whatever was guessed, kept, skipped or resumed; and
// no more bytes over NVMe than the format promises.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "base/error.h"
#include "base/memory_exhausted.h"
#include "tests/core/engine_harness.h"
#include "tests/core/open_store.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::testing {
namespace engine_formats_test {

using ::testing::Contains;
using ::testing::HasSubstr;
using enum OptimizerKind;
using enum StateFormat;
using Speculation = EngineConfig::Speculation;

constexpr float kLearningRate = 0.01F;
/// The small model's gradient has a norm of about 11; a loud step's four times that.
constexpr float kClip = 20.0F;
constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";
constexpr const char* kOnDevice = "params=device,grads=device,optimizer=nvme";

float loudness_of(std::uint64_t step) { return step % 3 == 1 ? 4.0F : 1.0F; }

struct FormatCase {
  StateKind state;
  std::optional<Rounding> rounding = std::nullopt;
};

std::string name_of(const FormatCase& one) {
  std::string name =
      fmt::format("{}_{}{}", to_string(one.state.optimizer), to_string(one.state.format),
                  one.rounding ? fmt::format("_{}", to_string(*one.rounding)) : std::string());
  std::ranges::replace(name, '-', '_');
  return name;
}

class EveryFormat : public ::testing::TestWithParam<FormatCase> {
 protected:
  EngineConfig config(const std::string& placement, std::uint64_t host_bytes) const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(placement);
    config.host_budget_bytes = host_bytes;
    config.clip_norm = kClip;
    config.optimizer.state = GetParam().state;
    config.optimizer.state_rounding = config.optimizer.param_rounding = GetParam().rounding;
    config.optimizer.rounding_seed = kRoundingSeed;
    if (config.placement.optimizer == Tier::kNvme) config.speculation = Speculation::kAlways;
    return config;
  }
  PlainTraining plain() const {
    return PlainTraining(model_, kClip, GetParam().state, GetParam().rounding);
  }
  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(
    Formats, EveryFormat,
    ::testing::Values(FormatCase{{kAdamW, kFp32}}, FormatCase{{kAdamW, kBf16Moments}},
                      FormatCase{{kAdamW, k8Bit}}, FormatCase{{kAdamW, kSplit}},
                      FormatCase{{kAdamW, kBf16}}, FormatCase{{kAdam, k8Bit}},
                      FormatCase{{kLion, kSplit}}, FormatCase{{kAdagrad, kBf16Moments}},
                      FormatCase{{kSgd, kBf16}}, FormatCase{{kAdamW, kFp32}, Rounding::kStochastic},
                      FormatCase{{kLion, k8Bit}, Rounding::kStochastic},
                      FormatCase{{kAdamW, kBf16Moments}, Rounding::kStochastic},
                      FormatCase{{kAdamW, kBf16}, Rounding::kNearest}),
    [](const auto& one) { return name_of(one.param); });

// A third of the guesses is wrong, a step is skipped after its guess, and every third step the
// engine is closed and opened under the next placement: with memory for a few records, or for all.
TEST_P(EveryFormat, GivesTheBitsOfPlainArraysWhateverHappens) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  const struct {
    const char* placement;
    std::uint64_t host_bytes;
  } lives[] = {{kDemo, 2 * kMiB},      {kDemo, 8 * kMiB},     {"all=nvme", 2 * kMiB},
               {"all=host", 8 * kMiB}, {kOnDevice, 2 * kMiB}, {"all=device", 8 * kMiB},
               {"all=nvme", 8 * kMiB}};
  PlainTraining expected = plain();
  std::uint64_t step = 0;
  for (const auto& [placement, host_bytes] : lives) {
    SCOPED_TRACE(::testing::Message() << placement << " in " << host_bytes);
    Rig rig(model_, config(placement, host_bytes), 2, 8 * kMiB);
    ASSERT_EQ(rig.engine->generation(), step);
    ASSERT_TRUE(same_params(*rig.engine, expected, model_)) << "as resumed";
    for (int i = 0; i < 3; ++i, ++step) {
      if (i == 1) {
        EXPECT_THROW(train_step(*rig.engine, model_, step, kLearningRate, {}, kInfinite), Error);
        ASSERT_TRUE(same_params(*rig.engine, expected, model_)) << "after a skipped step";
      }
      const StepResult result =
          train_step(*rig.engine, model_, step, kLearningRate, {}, loudness_of(step));
      ASSERT_EQ(result.grad_norm, expected.step(step, kLearningRate, loudness_of(step)));
    }
    ASSERT_TRUE(same_params(*rig.engine, expected, model_));
    rig.engine->make_durable();
    for (UnitId u = 0; u < model_.units.size(); ++u) {
      const std::vector<float> master = master_of(*rig.engine, u);
      const std::vector<float> want = expected.master(u);
      ASSERT_EQ(master.size(), want.size());
      ASSERT_EQ(std::memcmp(master.data(), want.data(), want.size() * sizeof(float)), 0) << u;
    }
  }
}

TEST_P(EveryFormat, GivesTheSameBitsOnEverySimdTarget) {
  constexpr std::uint64_t kSteps = 2;
  force_simd_target("scalar");  // the specification
  PlainTraining expected = plain();
  for (std::uint64_t step = 0; step < kSteps; ++step) expected.step(step, kLearningRate);
  std::size_t turn = 0;
  for_each_target([&] {
    // On each tier in turn, by one worker or by three.
    const char* const placement = std::array{kDemo, "all=nvme", "all=host"}[turn % 3];
    EngineConfig one = config(placement, 8 * kMiB);
    one.resume = EngineConfig::Resume::kNever;
    Rig rig(model_, one, turn++ % 2 == 0 ? 1 : 3, 8 * kMiB);
    for (std::uint64_t step = 0; step < kSteps; ++step)
      train_step(*rig.engine, model_, step, kLearningRate);
    EXPECT_TRUE(same_params(*rig.engine, expected, model_)) << placement;
    rig.engine->make_durable();
  });
}

TEST_P(EveryFormat, MovesTheBytesThatItPromises) {
  for (const char* placement : {kDemo, "all=nvme", kOnDevice}) {
    const ScratchDirectory directory;
    EngineConfig one = config(placement, 2 * kMiB);
    one.store = {{directory.path()}};
    one.speculation = Speculation::kNever;
    const ChunkTable table(model_, 1, one.optimizer.state);
    Rig rig(model_, one, 2, 8 * kMiB);
    constexpr std::uint64_t kSteps = 4;
    for (std::uint64_t step = 0; step < kSteps; ++step)
      train_step(*rig.engine, model_, step, kLearningRate);
    rig.engine->make_durable();
    const StateTraffic promised =
        state_traffic(one.optimizer.state, one.placement.params != Tier::kNvme);
    const auto updates = static_cast<double>(table.padded_count() * kSteps);
    // Records are whole tiles of bytes.
    const auto padding = static_cast<double>(table.chunks().size() * kTileBytes * kSteps);
    const Metrics& metrics = rig.engine->metrics();
    // In so little memory a record that was read ahead may have to make room for sooner ones.
    const auto read = static_cast<double>(metrics.value(Counter::kStateReadBytes) -
                                          metrics.value(Counter::kStateReadAgainBytes) +
                                          metrics.value(Counter::kRecordCacheHitBytes));
    const auto written = static_cast<double>(metrics.value(Counter::kStateWriteBytes));
    EXPECT_GE(read, promised.read * updates) << placement;
    EXPECT_LT(read, promised.read * updates + padding) << placement;
    EXPECT_GE(written, promised.written * updates) << placement;
    EXPECT_LT(written, promised.written * updates + padding) << placement;
    EXPECT_GE(metrics.value(Counter::kNvmeWriteBytes), written) << "counted where it is moved";
    EXPECT_THAT(rig.engine->description(), Contains(HasSubstr(to_string(one.optimizer.state))));
  }
}

TEST_P(EveryFormat, WorksInTheSmallestHostBudgetThatItNames) {
  EngineConfig one = config(kDemo, kMiB / 4);
  try {
    const Rig rig(model_, one);
    FAIL() << "opened in " << one.host_budget_bytes;
  } catch (const MemoryExhausted& error) {
    one.host_budget_bytes = error.shortage().smallest_bytes;
  }
  Rig rig(model_, one);
  PlainTraining expected = plain();
  for (std::uint64_t step = 0; step < 3; ++step) {
    train_step(*rig.engine, model_, step, kLearningRate, {}, loudness_of(step));
    expected.step(step, kLearningRate, loudness_of(step));
  }
  EXPECT_TRUE(same_params(*rig.engine, expected, model_));
}

TEST(EngineFormats, SplitMastersGiveTheBitsOfFp32MastersFromStepToStep) {
  const ModelSpec model = small_model();
  for (const OptimizerKind optimizer : {kAdamW, kLion}) {
    SCOPED_TRACE(to_string(optimizer));
    PlainTraining whole(model, kClip, {optimizer, kFp32});
    PlainTraining split(model, kClip, {optimizer, kSplit});
    for (std::uint64_t step = 0; step < 50; ++step) {
      ASSERT_EQ(whole.step(step, kLearningRate, loudness_of(step)),
                split.step(step, kLearningRate, loudness_of(step)));
    }
    for (UnitId u = 0; u < model.units.size(); ++u) {
      const std::vector<float> one = whole.master(u);
      EXPECT_EQ(std::memcmp(one.data(), split.master(u).data(), one.size() * sizeof(float)), 0);
    }
  }
}

/// The message of the error that opening with `config` is.
std::string refusal(const EngineConfig& config) {
  try {
    const Rig rig(small_model(), config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(EngineFormats, AStoreOfAnotherOptimizerOrFormatIsRefusedNamingBoth) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.optimizer.state = {kAdam, kSplit};
  EXPECT_EQ(refusal(config), "accepted");
  for (const StateKind& other : {StateKind{kAdamW, kSplit}, StateKind{kAdam, k8Bit}}) {
    config.optimizer.state = other;
    EXPECT_THAT(refusal(config), HasSubstr("adam in split"));
    EXPECT_THAT(refusal(config), HasSubstr(to_string(other)));
  }
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  EXPECT_EQ(OpenStore(*runtime, directory.path()).state().content().state,
            (StateKind{kAdam, kSplit}));
}

// Every unit but the second has padding in its last tile, and so has its sums.
TEST(EngineFormats, AdagradsSumsBeginWithTheInitialAccumulator) {
  const ModelSpec model = small_model();
  for (const StateFormat format : {kFp32, kBf16Moments, k8Bit, kSplit, kBf16}) {
    SCOPED_TRACE(to_string(format));
    const StateKind state{kAdagrad, format};
    PlainTraining expected(model, kClip, state, {}, 0.3F);
    PlainTraining from_zero(model, kClip, state);
    const ScratchDirectory directory;
    std::uint64_t step = 0;
    for (const char* placement : {kDemo, "all=host", "all=nvme"}) {
      EngineConfig config = small_config(directory.path());
      config.placement = parse_placement(placement);
      config.clip_norm = kClip;
      config.optimizer.state = state;
      // A store that is there keeps the sums it has.
      config.optimizer.initial_accumulator = step == 0 ? 0.3F : 0.7F;
      Rig rig(model, config, 2, 8 * kMiB);
      for (int i = 0; i < 2; ++i, ++step) {
        train_step(*rig.engine, model, step, kLearningRate);
        expected.step(step, kLearningRate);
        from_zero.step(step, kLearningRate);
      }
      EXPECT_TRUE(same_params(*rig.engine, expected, model)) << placement;
      EXPECT_FALSE(same_params(*rig.engine, from_zero, model)) << placement;
      rig.engine->make_durable();
    }
  }
}

TEST(EngineFormats, AnInitialAccumulatorIsAdagradsAndAFiniteSquare) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.optimizer.initial_accumulator = 0.1F;
  EXPECT_THAT(refusal(config), HasSubstr("only adagrad has one and the optimizer is adamw"));
  config.optimizer.state.optimizer = kAdagrad;
  for (const float wrong :
       {-0.1F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    config.optimizer.initial_accumulator = wrong;
    EXPECT_THAT(refusal(config), HasSubstr("cannot be a sum of squares"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(EngineFormats, SplitMastersAreNotRoundedStochastically) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.optimizer.state.format = kSplit;
  config.optimizer.param_rounding = Rounding::kStochastic;
  EXPECT_THAT(refusal(config), HasSubstr("stochastic"));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace engine_formats_test
}  // namespace ziggurat::testing
