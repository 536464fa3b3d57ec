// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_counts_test.cc: the engine counts the steps of each parameter, and a run that
// resumes goes on with the counts of the step that it finds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/core/lent_kinds.h"

namespace ziggurat::testing {
namespace lent_counts_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A trainer of two parameters, with its engine.
struct Counted {
  explicit Counted(EngineConfig config)
      : trainer(lent_model({300, 500}, DType::kFloat32), config.optimizer.state),
        engine(LentEngine::open(lent_model({300, 500}, DType::kFloat32), std::move(config),
                                *runtime, trainer.lent())) {}
  std::vector<std::uint64_t> counts() const { return {engine->steps_of(0), engine->steps_of(1)}; }
  /// A step with gradients for the parameters of `with`.
  void step(const std::vector<ParamId>& with, std::string_view blob, bool follows = false) {
    const std::vector<float> values(500, 0.5F);
    std::vector<TypedSpan<const std::byte>> gradients(2);
    for (const ParamId p : with)
      gradients[p] = as_typed(std::span(values).first(p == 0 ? 300 : 500));
    const std::vector<GroupStep> groups(2, GroupStep{.learning_rate = 0.01F});
    StepOptions options{.blob = std::as_bytes(std::span(blob))};
    options.groups = groups;
    options.blob_follows = follows;
    engine->step(gradients, options);
    engine->wait_all_updated();  // the gradients are the engine's until then
  }
  std::string blob() const {
    const std::span<const std::byte> its = engine->resumed_blob();
    return {reinterpret_cast<const char*>(its.data()), its.size()};
  }

  std::unique_ptr<Runtime> runtime = runtime_of(2);
  LentTrainer trainer;
  std::unique_ptr<LentEngine> engine;
};

EngineConfig counting(const ScratchDirectory& directory) {
  EngineConfig config = config_of({StateFormat::kFp32, DType::kFloat32}, Where::kNvme, directory);
  config.counts_steps = true;
  return config;
}

TEST(LentCounts, AreThoseOfStepsWithAGradient) {
  const ScratchDirectory directory;
  Counted its(counting(directory));
  EXPECT_THAT(its.counts(), ElementsAre(0, 0));
  its.step({0, 1}, "");
  its.step({1}, "");
  EXPECT_THAT(its.counts(), ElementsAre(1, 2));
}

TEST(LentCounts, GoOnWithTheStepThatARunFinds) {
  const ScratchDirectory directory;
  {
    Counted its(counting(directory));
    its.step({0, 1}, "first");
    its.step({1}, "second");
    its.engine->make_durable();
  }
  Counted its(counting(directory));
  EXPECT_THAT(its.counts(), ElementsAre(1, 2));
  EXPECT_EQ(its.blob(), "second");
  EXPECT_EQ(its.engine->resumed_blob_ranks(), 0U);
}

TEST(LentCounts, ThatATrainerSetsAreThoseOfTheNextStep) {
  const ScratchDirectory directory;
  {
    Counted its(counting(directory));
    its.step({0}, "", /*follows=*/true);
    its.engine->set_steps(0, 40);
    its.engine->set_steps(1, 50);
    const std::string_view blob = "late";
    its.engine->give_blob(std::as_bytes(std::span(blob)));
    EXPECT_THAT(its.counts(), ElementsAre(40, 50));
    its.engine->make_durable();
  }
  {
    Counted its(counting(directory));
    EXPECT_THAT(its.counts(), ElementsAre(1, 0)) << "no step was made with the new ones";
    EXPECT_EQ(its.blob(), "late");
    its.engine->set_steps(0, 40);
    its.step({0}, "");
    its.engine->make_durable();
  }
  EXPECT_THAT(Counted(counting(directory)).counts(), ElementsAre(41, 0));
}

TEST(LentCounts, StayWhereAStepIsRefused) {
  const ScratchDirectory directory;
  Counted its(counting(directory));
  its.step({0, 1}, "");
  const std::vector<float> values(500);
  const std::vector<TypedSpan<const std::byte>> wrong(2, as_typed(std::span(values)));
  const std::vector<GroupStep> groups(2, GroupStep{.learning_rate = 0.01F});
  StepOptions options{.blob = {}};
  const std::vector<TypedSpan<const std::byte>> none(2);
  EXPECT_THAT([&] { its.engine->step(none, options); },
              ThrowsMessage<Error>(HasSubstr("no groups were given")));
  options.groups = groups;
  EXPECT_THAT(
      [&] { its.engine->step(wrong, options); },
      ThrowsMessage<Error>(HasSubstr("500 elements were given, but the parameter has 300")));
  EXPECT_THAT(its.counts(), ElementsAre(1, 1));
}

// The rate that a step would have is looked at, not the one that is given.
TEST(LentCounts, LeaveNoStepWithARateThatIsNone) {
  const ScratchDirectory directory;
  Counted its(counting(directory));
  const std::vector<TypedSpan<const std::byte>> none(2);
  std::vector<GroupStep> groups(2, GroupStep{.learning_rate = 0.01F});
  groups[1].lr_decay = -0.5F;
  StepOptions options{.blob = {}};
  options.groups = groups;
  its.engine->set_steps(1, 1);
  its.engine->step(none, options);
  its.engine->set_steps(1, 2);
  EXPECT_THAT([&] { its.engine->step(none, options); },
              ThrowsMessage<Error>(HasSubstr("settings of 'unit1': learning rate inf")));
  EXPECT_EQ(its.engine->generation(), 1U);
}

TEST(LentCounts, AreNotMadeUpForStepsThatNobodyCounted) {
  const ScratchDirectory directory;
  EngineConfig config = counting(directory);
  config.counts_steps = false;
  {
    Counted its(config);
    its.step({0, 1}, "");
    its.engine->make_durable();
  }
  EXPECT_THAT([&] { Counted(counting(directory)); },
              ThrowsMessage<Error>(HasSubstr("were not counted when the state was made")));
  EXPECT_EQ(Counted(config).engine->generation(), 1U);
}

TEST(LentCounts, NeedAGroupForEachParameterAndAnEngineThatCounts) {
  const ScratchDirectory directory;
  EngineConfig config = counting(directory);
  ModelSpec model = lent_model({300, 500}, DType::kFloat32);
  model.units[1].params[0].group = 0;
  const auto runtime = runtime_of(2);
  LentTrainer trainer(model, config.optimizer.state);
  EXPECT_THAT([&] { LentEngine::open(model, config, *runtime, trainer.lent()); },
              ThrowsMessage<Error>(HasSubstr("parameter 'unit1' is in group 0")));
  config.counts_steps = false;
  const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
  EXPECT_THAT([&] { engine->steps_of(0); }, ThrowsMessage<Error>(HasSubstr("counts no steps")));
}

}  // namespace lent_counts_test
}  // namespace ziggurat::testing
