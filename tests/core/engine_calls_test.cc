// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_calls_test.cc: a call out of order is refused by name, with what to do instead,
// and changes nothing: the training goes on with the bits of one that never made it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <functional>

#include "base/error.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace engine_calls_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr UnitId kNoUnit = 5;  // the small model has 0 to 4

class EngineCalls : public ::testing::TestWithParam<const char*> {
 protected:
  EngineConfig config() const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam());
    return config;
  }
  /// `call` is refused, and says `words`.
  template <class Call>
  static void expect_refused(Call&& call, const std::string& name, const std::string& fix) {
    try {
      call();
      ADD_FAILURE() << name << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_THAT(error.what(), AllOf(HasSubstr(name), HasSubstr(fix)));
    }
  }

  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(Placements, EngineCalls,
                         ::testing::Values("params=host,grads=host,optimizer=nvme", "all=host",
                                           "all=nvme", "all=device"),
                         [](const auto& one) {
                           std::string name = one.param;
                           std::erase_if(name, [](char c) { return std::isalnum(c) == 0; });
                           return name;
                         });

TEST_P(EngineCalls, OfUnitsThatAreNotThereAreRefused) {
  Rig rig(model_, config(), 2, 8 * kMiB);
  Engine& engine = *rig.engine;
  const std::string fix = "units 0 to 4";
  expect_refused([&] { engine.acquire(kNoUnit); }, "acquire(unit 5)", fix);
  expect_refused([&] { engine.release(kNoUnit); }, "release(unit 5)", fix);
  expect_refused([&] { engine.gradient(kNoUnit); }, "gradient(unit 5)", fix);
  expect_refused([&] { engine.finish_gradient(kNoUnit); }, "finish_gradient(unit 5)", fix);
  expect_refused([&] { engine.master_chunks(kNoUnit); }, "master_chunks(unit 5)", fix);
  expect_refused([&] { engine.read_master(kNoUnit, 0); }, "read_master(unit 5)", fix);
  const std::size_t chunks = engine.master_chunks(4);
  expect_refused([&] { engine.read_master(4, chunks); },
                 "read_master(unit 4, chunk " + std::to_string(chunks) + ")",
                 "chunks 0 to " + std::to_string(chunks - 1));
}

TEST_P(EngineCalls, OutOfOrderAreRefusedAndTheTrainingGoesOn) {
  Rig rig(model_, config(), 2, 8 * kMiB);
  PlainTraining plain(model_, 1.0F);
  Engine& engine = *rig.engine;
  for (std::uint64_t step = 0; step < 3; ++step) {
    expect_refused([&] { engine.release(2); }, "release(unit 2 'unit2')", "acquire()");
    expect_refused([&] { engine.finish_gradient(2); }, "finish_gradient(unit 2 'unit2')",
                   "gradient() first");
    pass_step(engine, model_, step, kLearningRate, 1.0F, 1);
    expect_refused([&] { engine.release(2); }, "release(unit 2 'unit2')", "acquire()");
    expect_refused([&] { engine.acquire(2); }, "acquire(unit 2 'unit2')", "after step()");
    expect_refused([&] { engine.gradient(2); }, "gradient(unit 2 'unit2')", "call step()");
    expect_refused([&] { engine.finish_gradient(2); }, "finish_gradient(unit 2 'unit2')", "once");
    const StepOptions options{.learning_rate = kLearningRate, .blob = {}};
    expect_refused([&] { engine.step(options); }, "unit 0 ('unit0')", "finish_gradient()");
    const auto params = HostDevice::view(engine.acquire(0));
    const auto gradient = HostDevice::view(engine.gradient(0));
    for (std::size_t i = 0; i < params.count(); ++i)
      gradient[i] += gradient_of(value_at(params, i), 0, i, step);
    engine.release(0);
    engine.finish_gradient(0);
    const double norm = engine.step(options).grad_norm;
    ASSERT_EQ(norm, plain.step(step, kLearningRate));
  }
  EXPECT_TRUE(same_params(engine, plain, model_));
}

TEST_P(EngineCalls, ThatAcquireWhatIsHeldFromAnOlderGenerationAreRefused) {
  Rig rig(model_, config(), 2, 8 * kMiB);
  PlainTraining plain(model_, 1.0F);
  Engine& engine = *rig.engine;
  engine.acquire(3);
  train_step(engine, model_, 0, kLearningRate);
  plain.step(0, kLearningRate);
  expect_refused([&] { engine.acquire(3); }, "acquire(unit 3 'unit3')", "release() first");
  engine.release(3);
  EXPECT_TRUE(same_params(engine, plain, model_));
}

/// Closing gives everything back before the engine is destroyed: its store opens again.
TEST_P(EngineCalls, AfterCloseAreRefusedAndNothingIsHeld) {
  Rig rig(model_, config(), 2, 8 * kMiB);
  Engine& engine = *rig.engine;
  train_step(engine, model_, 0, kLearningRate);
  engine.make_durable();
  engine.close();
  engine.close();
  const auto expect_closed = [](const char* call, const std::function<void()>& made) {
    try {
      made();
      ADD_FAILURE() << call << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCancelled) << call;
      EXPECT_THAT(error.what(), HasSubstr("the engine was closed")) << call;
    }
  };
  expect_closed("acquire", [&] { engine.acquire(0); });
  expect_closed("gradient", [&] { engine.gradient(0); });
  expect_closed("step", [&] { engine.step({.learning_rate = kLearningRate, .blob = {}}); });
  expect_closed("read_master", [&] { engine.read_master(0, 0); });
  expect_closed("make_durable", [&] { engine.make_durable(); });
  EXPECT_EQ(engine.durable_generation(), 1U) << "as of then";
  EXPECT_EQ(engine.host_account().used_bytes(), 0U);
  EXPECT_EQ(rig.device->account().used_bytes(), 0U);
  const auto next = Engine::open(model_, config(), *rig.runtime, *rig.device, initialize);
  EXPECT_EQ(next->generation(), 1U);
}

}  // namespace engine_calls_test
}  // namespace ziggurat::testing
