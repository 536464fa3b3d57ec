// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_sums_test.cc: gradients that are summed on NVMe have the bits of those that are
// lent, in the least memory too, beside others in one record and after a kill; and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "tests/core/lent_kinds.h"

namespace ziggurat::testing {
namespace {

using ::testing::HasSubstr;
using enum StateFormat;

const std::vector<std::int64_t> kCounts{1, 105, 16'384, 16'385, 600'000};

class LentSums : public ::testing::TestWithParam<std::tuple<LentKind, Where>> {};

INSTANTIATE_TEST_SUITE_P(Formats, LentSums,
                         ::testing::Combine(::testing::Values(LentKind{kFp32, DType::kFloat32},
                                                              LentKind{kSplit, DType::kBFloat16},
                                                              LentKind{k8Bit, DType::kBFloat16},
                                                              LentKind{kFp32, DType::kBFloat16,
                                                                       Rounding::kStochastic}),
                                            ::testing::Values(Where::kHost, Where::kNvme)),
                         [](const auto& one) { return name_of(one.param); });

TEST_P(LentSums, HaveTheBitsOfPlainArraysInAnyMemory) {
  const auto& [kind, where] = GetParam();
  const std::vector<LentStep> steps{{.summed = {0, 1, 2, 3, 4}},
                                    {.left_out = {1, 4}, .summed = {0, 3}},
                                    {.summed = {1}},
                                    {},
                                    {.left_out = {0}, .written = {1, 4}, .summed = {1, 2, 4}},
                                    {.left_out = {0, 1, 2, 3, 4}},
                                    {.summed = {4}}};
  const ScratchDirectory directory;
  EngineConfig config = config_of(kind, where, directory);
  config.placement.grads = Tier::kNvme;
  const ModelSpec model = lent_model(kCounts, kind.dtype);
  const std::uint64_t smallest = smallest_budget(model, config);
  LentTrainer trainer(model, config.optimizer.state, kind.rounding);
  config.param_steps = [&](std::span<const std::byte>) { return trainer.steps(); };
  for (const std::uint64_t budget : {smallest, 64 * kMiB}) {
    config.host_budget_bytes = budget;
    for (std::size_t i = 0; i < steps.size(); i += 2) {
      const auto runtime = runtime_of(2);
      const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
      for (std::size_t s = i; s < std::min(i + 2, steps.size()); ++s)
        trainer.step(*engine, steps[s]);
      engine->make_durable();
      ASSERT_TRUE(trainer.same()) << "steps " << i << " and the next in " << budget;
      trainer.forget();
    }
  }
}

/// Backward has gone on when the write fails.
TEST(LentSumsOnAFailingDrive, RefuseTheStepUntilTheyAreDiscarded) {
  const ScratchDirectory directory;
  const LentKind kind{kSplit, DType::kBFloat16};
  EngineConfig config = config_of(kind, Where::kNvme, directory);
  config.placement.grads = Tier::kNvme;
  const ModelSpec model = lent_model(kCounts, kind.dtype);
  LentTrainer trainer(model, config.optimizer.state, kind.rounding);
  config.param_steps = [&](std::span<const std::byte>) { return trainer.steps(); };
  const auto runtime = runtime_of(2);
  FaultyEngine* drive = nullptr;
  runtime->io_engine = [&](Reactor& reactor, const std::string& path) {
    auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
    drive = faulty.get();
    return faulty;
  };
  const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
  const auto fail_writes = [&](bool fail) {
    runtime->reactor.block_on([](FaultyEngine* its, bool fails) -> Task<> {
      its->set_gate(
          [fails](FaultPoint point) { return fails && point == FaultPoint::kWrite ? EIO : 0; });
      co_return;
    }(drive, fail));
  };
  trainer.step(*engine, {.summed = {2, 4}});
  engine->make_durable();
  fail_writes(true);
  for (int i = 0; i < 2; ++i) {
    try {
      trainer.step(*engine, {.summed = {2, 4}});
      ADD_FAILURE() << "the step was made";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("EIO"));
    }
    EXPECT_EQ(engine->generation(), 1U);
    if (i == 0) fail_writes(false);
  }
  engine->discard_sum(2);
  engine->discard_sum(4);
  trainer.step(*engine, {.summed = {2, 4}});
  engine->make_durable();
  EXPECT_TRUE(trainer.same());
}

TEST(LentSumsCalls, SayWhatIsWrong) {
  const ScratchDirectory directory;
  const LentKind kind{kFp32, DType::kFloat32};
  EngineConfig config = config_of(kind, Where::kNvme, directory);
  const ModelSpec model = lent_model(kCounts, kind.dtype);
  LentTrainer trainer(model, config.optimizer.state);
  trainer.make_gradients(1, {});
  const TypedSpan<const std::byte> gradient = trainer.lent_gradients()[1];
  std::vector<float> values(105);
  const auto refused = [&](LentEngine& engine, const auto& call) -> std::string {
    try {
      call(engine);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  const auto add = [&](LentEngine& engine) { engine.add_gradient(1, gradient, 1); };
  const auto read = [&](LentEngine& engine) { engine.read_sum(1, 0, values); };
  const auto runtime = runtime_of(2);
  {
    const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
    EXPECT_THAT(refused(*engine, add), HasSubstr("choose `placement=grads=nvme`"));
  }
  config.placement.grads = Tier::kNvme;
  const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
  EXPECT_THAT(refused(*engine, read), HasSubstr("there is no sum"));
  EXPECT_THAT(refused(*engine, [&](LentEngine& its) { its.add_gradient(0, gradient, 1); }),
              HasSubstr("105 elements were given, but the parameter has 1"));
  add(*engine);
  read(*engine);
  EXPECT_EQ(std::memcmp(values.data(), gradient.bytes.data(), 105 * sizeof(float)), 0);
  std::vector<float> more(106);
  EXPECT_THAT(refused(*engine, [&](LentEngine& its) { its.read_sum(1, 0, more); }),
              HasSubstr("there is no sum of these elements"));
  engine->discard_sum(1);
  EXPECT_THAT(refused(*engine, read), HasSubstr("there is no sum"));
  config = config_of(kind, Where::kMemory, directory);
  config.placement.grads = Tier::kNvme;
  const auto open = [&](LentEngine&) { LentEngine::open(model, config, *runtime, trainer.lent()); };
  EXPECT_THAT(refused(*engine, open), HasSubstr("`store` is missing"));
}

}  // namespace
}  // namespace ziggurat::testing
