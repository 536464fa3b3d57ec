// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_engine_test.cc: an engine that uses a trainer's own memory gives the bits of
// plain arrays wherever its records are, whatever is left out, written or resumed; and what it
// refuses.
#include "core/engine/lent_engine.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <tuple>

#include "base/error.h"
#include "base/memory_exhausted.h"
#include "tests/core/lent_kinds.h"
#include "tests/core/lent_trainer.h"

namespace ziggurat::testing {
namespace lent_engine_test {

using ::testing::HasSubstr;
using enum StateFormat;

/// One element, less than a tile, a tile, one element more, several chunks' worth.
const std::vector<std::int64_t> kCounts{1, 105, 16'384, 16'385, 600'000};

using Kind = LentKind;

class LentBits : public ::testing::TestWithParam<std::tuple<Kind, Where>> {
 protected:
  ModelSpec model() const { return lent_model(kCounts, kind().dtype); }
  static Kind kind() { return std::get<0>(GetParam()); }
  static Where where() { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    Formats, LentBits,
    ::testing::Combine(
        ::testing::Values(Kind{kFp32, DType::kFloat32}, Kind{kFp32, DType::kBFloat16},
                          Kind{kFp32, DType::kFloat16}, Kind{kBf16Moments, DType::kFloat32},
                          Kind{k8Bit, DType::kFloat32}, Kind{k8Bit, DType::kBFloat16},
                          Kind{kSplit, DType::kBFloat16}, Kind{kBf16, DType::kBFloat16},
                          Kind{kFp32, DType::kBFloat16, Rounding::kStochastic},
                          Kind{kBf16Moments, DType::kBFloat16, Rounding::kStochastic},
                          Kind{kBf16, DType::kBFloat16, Rounding::kNearest}),
        ::testing::Values(Where::kMemory, Where::kHost, Where::kNvme)),
    [](const auto& one) { return name_of(one.param); });

// Every third step the engine is closed, where it has a store, and opened again from its store.
TEST_P(LentBits, AreThoseOfPlainArraysWhateverHappens) {
  const std::vector<LentStep> steps{{},
                                    {.left_out = {0, 4}},
                                    {.left_out = {}, .written = {1, 4}},
                                    {.left_out = {1}, .written = {0, 3}},
                                    {.left_out = {0, 1, 2, 3, 4}},
                                    {.left_out = {2, 4}, .written = {2, 3, 4}},
                                    {.left_out = {0, 1, 2, 4}},
                                    {.left_out = {3}, .written = {0, 1, 2}},
                                    {}};
  const ScratchDirectory directory;
  EngineConfig config = config_of(kind(), where(), directory);
  const std::uint64_t smallest = smallest_budget(model(), config);
  LentTrainer trainer(model(), config.optimizer.state, kind().rounding);
  config.counts_steps = true;
  for (const std::uint64_t budget : {smallest, 64 * kMiB}) {
    for (const std::size_t threads : {1U, 3U}) {
      SCOPED_TRACE(::testing::Message() << threads << " workers in " << budget);
      config.host_budget_bytes = budget;
      if (where() == Where::kMemory)
        trainer = LentTrainer(model(), config.optimizer.state, kind().rounding);
      std::unique_ptr<Runtime> runtime = runtime_of(threads);
      auto engine = LentEngine::open(model(), config, *runtime, trainer.lent());
      for (std::size_t i = 0; i < steps.size(); ++i) {
        if (i % 2 == 0) engine->expect_gradients();
        trainer.step(*engine, steps[i]);
        if (i % 3 != 2) continue;
        engine->wait_all_updated();
        ASSERT_TRUE(trainer.same()) << "step " << i;
        if (where() == Where::kMemory) continue;
        const std::uint64_t generation = engine->generation();
        engine->make_durable();
        engine.reset();
        trainer.forget();
        engine = LentEngine::open(model(), config, *runtime, trainer.lent());
        ASSERT_EQ(engine->generation(), generation);
        ASSERT_TRUE(trainer.same()) << "resumed after step " << i;
      }
    }
  }
}

/// On NVMe, in memory for a few records only.
class LentTraffic : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(
    Formats, LentTraffic,
    ::testing::Values(Kind{kFp32, DType::kFloat32}, Kind{kBf16Moments, DType::kFloat32},
                      Kind{k8Bit, DType::kFloat32}, Kind{kFp32, DType::kBFloat16},
                      Kind{kSplit, DType::kBFloat16}, Kind{kBf16, DType::kBFloat16}),
    [](const auto& one) {
      std::string name =
          fmt::format("{}_{}", to_string(one.param.format), to_string(one.param.dtype));
      std::ranges::replace(name, '-', '_');
      return name;
    });

TEST_P(LentTraffic, LeavesOutTheMasterThatTheParameterIs) {
  const ScratchDirectory directory;
  EngineConfig config = config_of(GetParam(), Where::kNvme, directory);
  const std::vector<std::int64_t> counts{16'384, 16'385, 600'000};  // none is packed
  const ModelSpec model = lent_model(counts, GetParam().dtype);
  config.host_budget_bytes = smallest_budget(model, config);
  LentTrainer trainer(model, config.optimizer.state);
  const auto runtime = runtime_of(2);
  const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
  std::uint64_t record_bytes = 0;
  std::uint64_t param_bytes = 0;
  const RecordFormat format = record_format(config.optimizer.state);
  for (const std::int64_t count : counts) {
    const auto tiles = (static_cast<std::uint64_t>(count) + kTileElements - 1) / kTileElements;
    record_bytes += format.record_bytes(tiles);
    param_bytes += tiles * kTileElements * size_bytes(GetParam().dtype);
  }
  const auto read = [&] {
    const Metrics& metrics = engine->metrics();
    return metrics.value(Counter::kStateReadBytes) + metrics.value(Counter::kRecordCacheHitBytes) -
           metrics.value(Counter::kStateReadAgainBytes);
  };
  const bool is_master = begins_with_param(GetParam().format, GetParam().dtype);
  const std::uint64_t before = read();
  trainer.step(*engine);  // makes the records, so there is nothing to read
  engine->make_durable();
  EXPECT_EQ(read(), before);
  const std::uint64_t written = engine->metrics().value(Counter::kStateWriteBytes);
  EXPECT_GE(written, record_bytes);
  EXPECT_LT(written, record_bytes + 64 * kTileBytes);
  constexpr std::uint64_t kSteps = 3;
  for (std::uint64_t i = 0; i < kSteps; ++i) trainer.step(*engine);
  engine->wait_all_updated();
  const std::uint64_t wanted = kSteps * (record_bytes - (is_master ? param_bytes : 0));
  EXPECT_GE(read() - before, wanted);
  // Records of several chunks are rounded up to tiles of bytes each.
  EXPECT_LT(read() - before, wanted + kSteps * 64 * kTileBytes);
  EXPECT_TRUE(trainer.same());
}

/// The message of what `call` throws, which is an error of the caller's.
template <class Call>
std::string refusal(const Call& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "accepted";
}

constexpr Kind kUsual{kFp32, DType::kFloat32};

class LentCalls : public ::testing::Test {
 protected:
  std::unique_ptr<LentEngine> open(const EngineConfig& config) {
    return LentEngine::open(model_, config, *runtime_, trainer_.lent());
  }
  std::string open_refusal(const EngineConfig& config) {
    return refusal([&] { open(config); });
  }

  const ScratchDirectory directory_;
  const ModelSpec model_ = lent_model({1, 105, 20'000}, DType::kFloat32);
  LentTrainer trainer_{model_, {}};
  std::unique_ptr<Runtime> runtime_ = runtime_of(1);
};

TEST_F(LentCalls, AfterCloseAreRefused) {
  const EngineConfig config = config_of(kUsual, Where::kNvme, directory_);
  const auto engine = open(config);
  trainer_.step(*engine);
  engine->close();
  EXPECT_TRUE(engine->has_ended());
  EXPECT_THAT(refusal([&] { engine->check(); }, ErrorCode::kCancelled),
              HasSubstr("the engine was closed"));
  EXPECT_THAT(refusal([&] { engine->wait_all_updated(); }, ErrorCode::kCancelled),
              HasSubstr("the engine was closed"));
}

TEST_F(LentCalls, RefuseSettingsThatATrainerOfThisKindHasItself) {
  const EngineConfig good = config_of(kUsual, Where::kNvme, directory_);
  EngineConfig config = good;
  config.clip_norm = 1;
  EXPECT_THAT(open_refusal(config), HasSubstr("clips them itself"));
  config = good;
  config.param_groups = {{.params = "*", .lr_scale = 0.5F}};
  EXPECT_THAT(open_refusal(config), HasSubstr("give each step its groups"));
  config = good;
  config.store.clear();
  EXPECT_THAT(open_refusal(config), HasSubstr("`store` is missing: give a directory"));
  config = good;
  config.optimizer.state.format = kSplit;
  EXPECT_THAT(open_refusal(config), HasSubstr("keeps the parameter in bf16"));
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(LentCalls, RefuseParametersThatAreNotTheModels) {
  const EngineConfig config = config_of(kUsual, Where::kMemory, directory_);
  const auto with = [&](const std::vector<TypedSpan<std::byte>>& params) {
    return refusal([&] { LentEngine::open(model_, config, *runtime_, params); });
  };
  std::vector<TypedSpan<std::byte>> params = trainer_.lent();
  params.pop_back();
  EXPECT_THAT(with(params), HasSubstr("2 parameters are lent, but the model has 3 units"));
  params = trainer_.lent();
  params[1] = params[1].subspan(0, 104);
  EXPECT_THAT(with(params),
              HasSubstr("'unit1': 104 elements of fp32 are lent, but the unit has 105"));
  params = trainer_.lent();
  params[1] = {DType::kBFloat16, params[1].bytes.first(210)};
  EXPECT_THAT(with(params),
              HasSubstr("105 elements of bf16 are lent, but the unit has 105 of fp32"));
}

TEST_F(LentCalls, RefuseAStepThatIsNoneAndGoOn) {
  const auto engine = open(config_of(kUsual, Where::kNvme, directory_));
  trainer_.make_gradients(1, {});
  const std::vector<TypedSpan<const std::byte>> good = trainer_.lent_gradients();
  std::vector<GroupStep> groups = trainer_.groups_of({});
  const auto step = [&](const std::vector<TypedSpan<const std::byte>>& gradients) {
    StepOptions options{.blob = {}};
    options.groups = groups;
    return refusal([&] { engine->step(gradients, options); });
  };
  std::vector<TypedSpan<const std::byte>> gradients(good.begin(), good.end() - 1);
  EXPECT_THAT(step(gradients), HasSubstr("2 gradients were given for 3 parameters"));
  gradients = good;
  gradients[2] = gradients[2].subspan(0, 19'999);
  EXPECT_THAT(step(gradients), HasSubstr("19999 elements were given, but the parameter has 20000"));
  for (const float wrong :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    groups[1].grad_scale = wrong;
    EXPECT_THAT(step(good), HasSubstr("gradient scale"));
  }
  groups.pop_back();
  EXPECT_THAT(step(good), HasSubstr("2 groups of settings were given, but the model has 3"));
  EXPECT_EQ(engine->generation(), 0U);
  trainer_.step(*engine);
  engine->wait_all_updated();
  EXPECT_TRUE(trainer_.same());
}

/// Two engines of half a parameter each, as two ranks have them, make the bits of one that has it
/// whole.
TEST(LentSlices, AreRoundedAsTheWholeParameterIs) {
  constexpr std::int64_t kCount = 40'000;
  constexpr std::int64_t kCut = 16'001;
  const auto trained = [](std::int64_t begin, std::int64_t end) {
    ModelSpec model{.name = "slices", .units = {}};
    model.units.push_back({.name = "w", .params = {{.name = "w", .shape = {end - begin}}}});
    TypedArray values(DType::kBFloat16, static_cast<std::size_t>(end - begin));
    TypedArray gradient = values;
    for (std::size_t i = 0; i < values.count(); ++i) {
      const std::uint64_t element = static_cast<std::uint64_t>(begin) + i;
      values.set(i, initial_value(0, element));
      gradient.set(i, initial_value(1, element));
    }
    const ScratchDirectory directory;
    EngineConfig config = config_of({kBf16, DType::kBFloat16}, Where::kMemory, directory);
    config.first_elements = {static_cast<std::uint64_t>(begin)};
    const auto runtime = runtime_of(1);
    const std::vector<TypedSpan<std::byte>> lent{values.span()};
    const auto engine = LentEngine::open(model, config, *runtime, lent);
    const std::vector<TypedSpan<const std::byte>> gradients{gradient.span()};
    for (int step = 0; step < 3; ++step) {
      engine->step(gradients, {.learning_rate = 0.001F, .blob = {}});
      engine->wait_all_updated();
    }
    return values.bytes;
  };
  const std::vector<std::byte> whole = trained(0, kCount);
  std::vector<std::byte> slices = trained(0, kCut);
  const std::vector<std::byte> rest = trained(kCut, kCount);
  slices.insert(slices.end(), rest.begin(), rest.end());
  EXPECT_EQ(slices, whole);
}

TEST_F(LentCalls, RefuseToLeaveAUnitOutOfParametersRoundedByAStepThatNobodyCounts) {
  Kind stochastic = kUsual;
  stochastic.rounding = Rounding::kStochastic;
  const auto engine = open(config_of(stochastic, Where::kMemory, directory_));
  trainer_.make_gradients(1, {1});
  const std::vector<GroupStep> groups = trainer_.groups_of({});
  StepOptions options{.blob = {}};
  options.groups = groups;
  EXPECT_THAT(
      refusal([&] { engine->step(trainer_.lent_gradients(), options); }, ErrorCode::kUnimplemented),
      HasSubstr("`param_rounding=nearest`"));
  EXPECT_EQ(engine->generation(), 0U);
  trainer_.make_gradients(1, {});
  EXPECT_EQ(engine->step(trainer_.lent_gradients(), options).generation, 1U);
  engine->wait_all_updated();
}

TEST_F(LentCalls, MoveAUnitOnlyToMemoryThatHoldsIt) {
  const auto engine = open(config_of(kUsual, Where::kNvme, directory_));
  TypedArray moved = trainer_.params[2];
  EXPECT_THAT(refusal([&] { engine->lend_param(2, moved.span().subspan(0, 9)); }),
              HasSubstr("9 elements were given, but the parameter has 20000"));
  TypedArray narrow(DType::kBFloat16, moved.count());
  EXPECT_THAT(refusal([&] { engine->lend_param(2, narrow.span()); }),
              HasSubstr("the parameter is fp32, but the memory is bf16"));
  EXPECT_THAT(refusal([&] { engine->lend_param(3, moved.span()); }),
              HasSubstr("the model has 3 parameters: give 0 to 2"));
  trainer_.step(*engine);
  engine->wait_all_updated();
  std::swap(moved, trainer_.params[2]);  // the trainer's is what was `moved`, and as it was
  trainer_.params[2].bytes = moved.bytes;
  engine->lend_param(2, trainer_.params[2].span());
  trainer_.step(*engine);
  engine->wait_all_updated();
  EXPECT_TRUE(trainer_.same());
}

TEST_F(LentCalls, RefuseParametersThatAStoreCannotTellApartOrHold) {
  EngineConfig config = config_of(kUsual, Where::kNvme, directory_);
  ModelSpec model = model_;
  model.units[1].params[0].name = model.units[0].params[0].name;
  const auto lent = trainer_.lent();
  EXPECT_THAT(refusal([&] { LentEngine::open(model, config, *runtime_, lent); }),
              HasSubstr("two parameters have the name 'unit0'"));
  model = model_;
  model.units[1].params[0].shape = {0};
  EXPECT_THAT(refusal([&] { LentEngine::open(model, config, *runtime_, lent); }),
              HasSubstr("parameter 'unit1' has no elements"));
  model = model_;
  model.units[0].params.push_back(model.units[1].params[0]);
  EXPECT_THAT(refusal([&] { LentEngine::open(model, config, *runtime_, lent); }),
              HasSubstr("give each lent parameter a unit of its own"));
}

TEST_F(LentCalls, UpdateAtOnceWhatIsInMemory) {
  for (const Where where : {Where::kMemory, Where::kNvme}) {
    const auto engine = open(config_of(kUsual, where, directory_));  // all records fit
    for (int i = 0; i < 5; ++i) {
      trainer_.step(*engine, {.left_out = {}, .update_at_once = true});
      ASSERT_TRUE(trainer_.same()) << "not waited for, step " << i;
    }
    engine->wait_all_updated();
    trainer_ = LentTrainer(model_, StateKind{});
  }
}

TEST_F(LentCalls, UpdateAtOnceDoesNotWaitForTheDrive) {
  EngineConfig config = config_of(kUsual, Where::kNvme, directory_);
  config.host_budget_bytes = smallest_budget(model_, config);
  const auto engine = open(config);
  for (int i = 0; i < 3; ++i) trainer_.step(*engine, {.left_out = {}, .update_at_once = true});
  engine->wait_all_updated();
  EXPECT_TRUE(trainer_.same());
}

TEST_F(LentCalls, TakeABlobThatNoStepAwaitsForAMistake) {
  const auto engine = open(config_of(kUsual, Where::kNvme, directory_));
  EXPECT_THAT(refusal([&] { engine->give_blob({}); }), HasSubstr("does not wait for a blob"));
}

TEST_F(LentCalls, TakeNoStepWithoutEpsForDamage) {
  EngineConfig config = config_of(kUsual, Where::kNvme, directory_);
  config.host_budget_bytes = smallest_budget(model_, config);
  const auto engine = open(config);
  trainer_.eps = 0;  // the padding of a record would be 0 / 0
  for (int i = 0; i < 3; ++i) trainer_.step(*engine);
  engine->make_durable();
  EXPECT_TRUE(trainer_.same());
}

// A record that is read without its master is not what was written then.
TEST_F(LentCalls, TellATrainerThatWroteAParameterInSecret) {
  EngineConfig config = config_of(kUsual, Where::kNvme, directory_);
  config.host_budget_bytes = smallest_budget(model_, config);
  const auto engine = open(config);
  trainer_.step(*engine);
  engine->make_durable();
  trainer_.params[2].set(77, 3.0F);
  const auto step = [&] {
    trainer_.step(*engine);
    engine->make_durable();
  };
  EXPECT_THAT(refusal(step, ErrorCode::kInvalidArgument),
              HasSubstr("was changed since the last step, but the engine was not told"));
}

}  // namespace lent_engine_test
}  // namespace ziggurat::testing
