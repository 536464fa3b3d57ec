// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_test.cc: the engine against the same training in plain arrays: any placement,
// any thread count, any order of use gives the same bits; a run resumed goes on as if it had never
// stopped; what is wrong is said.
#include "core/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "tests/core/engine_harness.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;

template <class Action>
Error error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorCode::kUnimplemented, "none"};
}

struct PlacementCase {
  const char* name;
  const char* placement;
  float clip_norm;
  std::size_t threads;
  int slots = 2;
};

class EveryPlacement : public ::testing::TestWithParam<PlacementCase> {};

TEST_P(EveryPlacement, GivesTheBitsOfPlainArrays) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(GetParam().placement);
  config.clip_norm = GetParam().clip_norm;
  config.slots = GetParam().slots;
  Rig rig(model, config, GetParam().threads, 8 * kMiB);
  PlainTraining plain(model, config.clip_norm);
  for (std::uint64_t step = 0; step < 5; ++step) {
    const StepResult result = train_step(*rig.engine, model, step, kLearningRate);
    const double norm = plain.step(step, kLearningRate);
    ASSERT_EQ(result.grad_norm, norm);
    ASSERT_EQ(result.generation, step + 1);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
  rig.engine->make_durable();
  EXPECT_EQ(rig.engine->durable_generation(), 5U);
  for (UnitId u = 0; u < model.units.size(); ++u) {
    const std::vector<float> master = master_of(*rig.engine, u);
    const std::vector<float> expected = plain.master(u);
    ASSERT_EQ(master.size(), expected.size());
    EXPECT_EQ(std::memcmp(master.data(), expected.data(), expected.size() * sizeof(float)), 0)
        << "unit " << u;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Engine, EveryPlacement,
    ::testing::Values(
        PlacementCase{"Demo", "params=host,grads=host,optimizer=nvme", 1.0F, 2},
        PlacementCase{"DemoOneThread", "params=host,grads=host,optimizer=nvme", 1.0F, 1},
        PlacementCase{"AllHost", "all=host", 1.0F, 2},
        PlacementCase{"AllNvme", "all=nvme", 1.0F, 2},
        PlacementCase{"AllDevice", "all=device", 1.0F, 2},
        PlacementCase{"ParamsOnDevice", "params=device,grads=nvme,optimizer=host", 1.0F, 3},
        PlacementCase{"GradsOnDevice", "params=nvme,grads=device,optimizer=nvme", 1.0F, 2},
        PlacementCase{"ParamsOnNvme", "params=nvme,grads=host,optimizer=host", 1.0F, 2},
        PlacementCase{"GradsOnNvme", "params=host,grads=nvme,optimizer=nvme", 1.0F, 2},
        PlacementCase{"OptimizerOnHost", "params=device,grads=device,optimizer=host", 1.0F, 2},
        PlacementCase{"DemoOneSlot", "params=host,grads=host,optimizer=nvme", 1.0F, 2, 1},
        PlacementCase{"NvmeOneSlot", "all=nvme", 1.0F, 1, 1},
        PlacementCase{"NvmeUnclipped", "all=nvme", 0.0F, 2},
        PlacementCase{"DemoUnclipped", "params=host,grads=host,optimizer=nvme", 0.0F, 2},
        PlacementCase{"HostUnclipped", "all=host", 0.0F, 1}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(Engine, ResumesUnderAnotherPlacementAndBudgetWithTheSameBits) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  PlainTraining plain(model, 1.0F);
  const char* placements[] = {"params=host,grads=host,optimizer=nvme", "all=host", "all=nvme",
                              "params=nvme,grads=host,optimizer=device", "all=nvme"};
  std::uint64_t step = 0;
  for (const char* placement : placements) {
    EngineConfig config = small_config(directory.path());
    config.placement = parse_placement(placement);
    config.host_budget_bytes = (8 + step) * kMiB;
    Rig rig(model, config, 2, 8 * kMiB);
    ASSERT_EQ(rig.engine->resumed(), step > 0);
    ASSERT_EQ(rig.engine->generation(), step);
    if (step > 0) {
      const std::uint64_t cursor = step;
      const auto blob = rig.engine->resumed_blob();
      ASSERT_EQ(blob.size(), sizeof(cursor));
      EXPECT_EQ(std::memcmp(blob.data(), &cursor, sizeof(cursor)), 0);
    }
    for (int i = 0; i < 3; ++i) {
      const std::uint64_t cursor = step + 1;
      train_step(*rig.engine, model, step, kLearningRate, std::as_bytes(std::span(&cursor, 1)));
      plain.step(step, kLearningRate);
      ++step;
    }
    EXPECT_TRUE(same_params(*rig.engine, plain, model)) << placement;
    rig.engine->make_durable();
  }
}

TEST(Engine, AStepThatNobodyWaitedForIsResumedFromTheLastDurableOne) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const EngineConfig config = small_config(directory.path());
  {
    Rig rig(model, config);
    for (std::uint64_t step = 0; step < 3; ++step)
      train_step(*rig.engine, model, step, kLearningRate);
  }  // closed in mid-sweep
  Rig rig(model, config);
  const std::uint64_t resumed = rig.engine->generation();
  ASSERT_LE(resumed, 3U);
  PlainTraining plain(model, 1.0F);
  for (std::uint64_t step = 0; step < 6; ++step) {
    plain.step(step, kLearningRate);
    if (step >= resumed) train_step(*rig.engine, model, step, kLearningRate);
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
}

TEST(Engine, UnitsUsedOutOfTheLearnedOrderAreServed) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  Rig rig(model, small_config(directory.path()));
  PlainTraining plain(model, 1.0F);
  for (std::uint64_t step = 0; step < 4; ++step) {
    train_step(*rig.engine, model, step, kLearningRate);
    plain.step(step, kLearningRate);
    for (const UnitId u : {3U, 0U, 4U, 1U, 1U}) {  // an evaluation that branches
      const auto got = HostDevice::view(rig.engine->acquire(u));
      EXPECT_TRUE(std::ranges::equal(got.bytes, plain.params(u).bytes));
      rig.engine->release(u);
    }
  }
}

TEST(Engine, NestedAcquiresKeepAUnitUntilTheLastRelease) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  Rig rig(model, small_config(directory.path()));
  const auto first = HostDevice::view(rig.engine->acquire(0));
  const auto second = HostDevice::view(rig.engine->acquire(0));
  EXPECT_EQ(first.bytes.data(), second.bytes.data());
  rig.engine->release(0);
  const PlainTraining plain(model, 1.0F);
  EXPECT_TRUE(std::ranges::equal(first.bytes, plain.params(0).bytes));
  rig.engine->release(0);
}

TEST(Engine, ANormThatIsNotFiniteUpdatesNothingAndLeavesTheLastGeneration) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const EngineConfig config = small_config(directory.path());
  PlainTraining plain(model, 1.0F);
  {
    Rig rig(model, config);
    train_step(*rig.engine, model, 0, kLearningRate);
    plain.step(0, kLearningRate);
    rig.engine->make_durable();
    for (UnitId u = 0; u < model.units.size(); ++u) {
      HostDevice::view(rig.engine->gradient(u))[0] =
          u == 2 ? std::numeric_limits<float>::quiet_NaN() : 1.0F;
      rig.engine->finish_gradient(u);
    }
    const Error error =
        error_of([&] { rig.engine->step({.learning_rate = kLearningRate, .blob = {}}); });
    EXPECT_EQ(error.code(), ErrorCode::kNotFinite);
    EXPECT_THAT(error.what(), HasSubstr("generation 1 is still current: skip the step"));
  }
  Rig rig(model, config);
  EXPECT_EQ(rig.engine->generation(), 1U);
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
}

TEST(Engine, AStepWithoutAllGradientsNamesTheUnit) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  Rig rig(model, small_config(directory.path()));
  rig.engine->gradient(0);
  rig.engine->finish_gradient(0);
  const Error error =
      error_of([&] { rig.engine->step({.learning_rate = kLearningRate, .blob = {}}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("unit1"));
}

TEST(Engine, AHostBudgetTooSmallSaysTheSmallestAndWritesNothing) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.host_budget_bytes = 64 * kKiB;
  const Error error = error_of([&] { const Rig rig(model, config); });
  EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error.what(), HasSubstr("smallest that works"));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Engine, TheSmallestHostBudgetItNamesWorks) {
  const ModelSpec model = small_model();
  for (const char* placement : {"params=host,grads=host,optimizer=nvme", "all=nvme", "all=host"}) {
    const ScratchDirectory directory;
    EngineConfig config = small_config(directory.path());
    config.placement = parse_placement(placement);
    config.host_budget_bytes = kMiB / 4;
    const std::string text = error_of([&] { const Rig rig(model, config); }).what();
    const std::string marker = "that works with these settings is ";
    const std::string size = text.substr(text.find(marker) + marker.size());
    config.host_budget_bytes = parse_size(size.substr(0, size.find(':')), "size");
    Rig rig(model, config);
    PlainTraining plain(model, 1.0F);
    for (std::uint64_t step = 0; step < 3; ++step) {
      train_step(*rig.engine, model, step, kLearningRate);
      plain.step(step, kLearningRate);
    }
    EXPECT_TRUE(same_params(*rig.engine, plain, model)) << placement;
  }
}

TEST(Engine, ADeviceBudgetTooSmallSaysTheSmallestAndWritesNothing) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const Error error =
      error_of([&] { const Rig rig(model, small_config(directory.path()), 2, 256 * kKiB); });
  EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error.what(), HasSubstr("`device_memory` 256.0 KiB is too small"));
  EXPECT_THAT(error.what(), HasSubstr("smallest that works"));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Engine, ATightDeviceBudgetTakesTurnsAndGivesTheSameBits) {
  const ModelSpec model = small_model();
  // From the least that works up: one accumulator or two, parameters that must make room for each
  // other.
  for (std::uint64_t device_bytes = 600 * kKiB; device_bytes <= 1200 * kKiB;
       device_bytes += 100 * kKiB) {
    const ScratchDirectory directory;
    Rig rig(model, small_config(directory.path()), 2, device_bytes);
    PlainTraining plain(model, 1.0F);
    for (std::uint64_t step = 0; step < 3; ++step) {
      train_step(*rig.engine, model, step, kLearningRate);
      plain.step(step, kLearningRate);
    }
    EXPECT_TRUE(same_params(*rig.engine, plain, model)) << device_bytes;
  }
}

TEST(Engine, AUnitWhoseGradientStaysOpenLeavesRoomForTheOthers) {
  const ModelSpec model = small_model();
  for (const std::uint64_t device_kib : {700U, 900U, 1200U}) {
    const ScratchDirectory directory;
    Rig rig(model, small_config(directory.path()), 2, device_kib * kKiB);
    for (std::uint64_t step = 0; step < 3; ++step) {
      rig.engine->gradient(4);  // tied: begun first, finished last
      for (UnitId u = 4; u-- > 0;) {
        HostDevice::view(rig.engine->gradient(u))[0] = 1.0F;
        rig.engine->finish_gradient(u);
      }
      rig.engine->finish_gradient(4);
      EXPECT_EQ(rig.engine->step({.learning_rate = kLearningRate, .blob = {}}).grad_norm, 2.0);
    }
  }
}

TEST(Engine, TwoUnitsHeldWhileAThirdDoesNotFitIsReportedNotHung) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  // One accumulator takes 256 KiB; beside it units 3 (96 KiB) and 4 (128 KiB) fit, unit 2 no more.
  Rig rig(model, small_config(directory.path()), 2, 520 * kKiB);
  rig.engine->acquire(3);
  rig.engine->acquire(4);
  const Error error = error_of([&] { rig.engine->acquire(2); });
  EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  rig.engine->release(3);
  rig.engine->release(4);
}

TEST(Engine, AStoreOfAnotherRunOrModelIsRefusedByName) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  { const Rig rig(model, config); }
  config.run_identity = "data=1 seed=3";
  const Error identity = error_of([&] { const Rig rig(model, config); });
  EXPECT_EQ(identity.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(identity.what(), HasSubstr("seed=2"));
  EXPECT_THAT(identity.what(), HasSubstr("seed=3"));
  ModelSpec other = model;
  other.name = "other";
  const Error named = error_of([&] { const Rig rig(other, small_config(directory.path())); });
  EXPECT_THAT(named.what(), HasSubstr("'small'"));
  ModelSpec wider = model;
  wider.units[1].params[0].shape = {127, 128};
  EXPECT_EQ(error_of([&] { const Rig rig(wider, small_config(directory.path())); }).code(),
            ErrorCode::kInvalidArgument);
}

TEST(Engine, ResumeNeverStartsOver) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  {
    Rig rig(model, config);
    train_step(*rig.engine, model, 0, kLearningRate);
    rig.engine->make_durable();
  }
  config.resume = EngineConfig::Resume::kNever;
  const Rig rig(model, config);
  EXPECT_FALSE(rig.engine->resumed());
  EXPECT_EQ(rig.engine->generation(), 0U);
}

TEST(Engine, ResumeNewRefusesAStoreThatIsThereAndLeavesIt) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.resume = EngineConfig::Resume::kNew;
  {
    Rig rig(model, config);
    train_step(*rig.engine, model, 0, kLearningRate);
    rig.engine->make_durable();
  }
  try {
    const Rig rig(model, config);
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("there is a store already"));
  }
  config.resume = EngineConfig::Resume::kAuto;
  const Rig rig(model, config);
  EXPECT_EQ(rig.engine->generation(), 1U);
}

TEST(Engine, LeavesAStoreThatTellsItsModelAndGeneration) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const std::uint64_t cursor = 77;
  {
    Rig rig(model, small_config(directory.path()));
    train_step(*rig.engine, model, 0, kLearningRate, std::as_bytes(std::span(&cursor, 1)));
    rig.engine->make_durable();
  }
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  OpenStore store(*runtime, directory.path());
  const StateContent& content = store.state().content();
  EXPECT_EQ(content.model, "small");
  EXPECT_EQ(content.run_identity, "data=1 seed=2");
  EXPECT_EQ(content.step, 1U);
  ASSERT_EQ(content.blob.size(), sizeof(cursor));
}

TEST(Engine, PrefetchHitsOnceTheOrderIsLearned) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  Rig rig(model, small_config(directory.path()));
  train_step(*rig.engine, model, 0, kLearningRate);
  const std::uint64_t learned = rig.engine->metrics().value(Counter::kPrefetchHits);
  for (std::uint64_t step = 1; step < 4; ++step)
    train_step(*rig.engine, model, step, kLearningRate);
  EXPECT_GT(rig.engine->metrics().value(Counter::kPrefetchHits), learned);
}

}  // namespace
}  // namespace ziggurat::testing
