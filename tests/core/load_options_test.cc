// SPDX-License-Identifier: Apache-2.0
// tests/core/load_options_test.cc: a state whose parameters are called otherwise, or are more or
// fewer than the model's: refused with the whole list, or loaded as far as it goes.
#include "core/checkpoint/load_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/core/engine_harness.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace load_options_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr float kLearningRate = 0.01F;

TEST(LoadRename, PutsWhatTheStarStoodForIntoTheNewName) {
  const LoadRename layers{.from = "blocks.*.weight", .to = "h.*.w"};
  EXPECT_EQ(layers.of("blocks.12.mlp.weight"), "h.12.mlp.w");
  EXPECT_EQ(layers.of("blocks..weight"), "h..w");
  EXPECT_FALSE(layers.of("blocks.weight"));  // the two ends do not share a letter
  EXPECT_FALSE(layers.of("blocks.1.bias"));
  const LoadRename one{.from = "head", .to = "wte.weight"};
  EXPECT_EQ(one.of("head"), "wte.weight");
  EXPECT_FALSE(one.of("heads"));
  EXPECT_EQ((LoadRename{.from = "*", .to = "model.*"}).of("x"), "model.x");
}

TEST(LoadRename, IsReadFromTextAndWrittenBack) {
  const std::string text = "transformer.*=*;head.weight=wte.weight";
  const std::vector<LoadRename> renames = parse_load_renames(text);
  EXPECT_THAT(renames, ElementsAre(LoadRename{"transformer.*", "*"},
                                   LoadRename{"head.weight", "wte.weight"}));
  EXPECT_EQ(to_text(renames), text);
  for (const char* wrong : {"a", "a=", "=a", "a.*=b", "a=b.*", "a.*.*=b.*.*", "a=b=c", "a=b;;"}) {
    EXPECT_THROW(parse_load_renames(wrong), Error) << wrong;
  }
}

/// small_model() as a store of two steps, and models that differ from it.
class PartialLoad : public ::testing::Test {
 protected:
  PartialLoad() {
    Rig rig(small_model(), small_config(saved_.path()));
    for (std::uint64_t step = 0; step < 2; ++step) {
      train_step(*rig.engine, small_model(), step, kLearningRate);
      plain_.step(step, kLearningRate);
    }
    rig.engine->make_durable();
  }

  struct Loaded {
    std::unique_ptr<Runtime> runtime;
    std::unique_ptr<Device> device;
    std::unique_ptr<Engine> engine;
  };
  Loaded load(const ModelSpec& model, const LoadOptions& options, StateFormat format = {}) {
    Loaded loaded;
    loaded.runtime = Runtime::create({.threads = 2, .trace_path = ""});
    loaded.device = HostDevice::create(loaded.runtime->reactor, 8 * kMiB);
    OpenStore store(*loaded.runtime, saved_.path());
    EngineConfig config = small_config(fresh_.path());
    config.resume = EngineConfig::Resume::kNever;
    config.optimizer.state.format = format;
    loaded.engine =
        Engine::open(model, config, *loaded.runtime, *loaded.device, store.state(), options);
    return loaded;
  }
  std::string refusal(const ModelSpec& model, const LoadOptions& options) {
    try {
      load(model, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "loaded";
  }

  ScratchDirectory saved_;
  ScratchDirectory fresh_;
  PlainTraining plain_{small_model(), 1.0F};
};

/// Two parameters of other names, one of another shape, one more unit, and one unit less.
ModelSpec another_model() {
  ModelSpec model = small_model();
  for (ParamSpec& param : model.units[0].params) param.name = "first" + param.name.substr(5);
  model.units[1].params[0].shape = {64, 128};
  model.units[4] = {.name = "more", .params = {{.name = "more.weight", .shape = {40, 128}}}};
  return model;
}

TEST_F(PartialLoad, RefusesAModelThatDiffersWithEverythingThatDoes) {
  const std::string all = refusal(another_model(), {});
  for (const char* name : {"first.weight", "first.bias", "more.weight", "unit0.weight",
                           "unit0.bias", "unit4.weight", "unit4.bias"})
    EXPECT_THAT(all, HasSubstr(std::string("'") + name + "'"));
  EXPECT_THAT(
      all,
      AllOf(HasSubstr("the source lacks"), HasSubstr("this model lacks"),
            HasSubstr("'unit1.weight' has the shape [128, 128] there and [64, 128] in this model"),
            Not(HasSubstr("unit2"))));
  // A shape is never passed over.
  EXPECT_THAT(refusal(another_model(), {.initialize = initialize}), HasSubstr("unit1.weight"));
  ModelSpec fewer = small_model();
  fewer.units.pop_back();
  EXPECT_THAT(refusal(fewer, {}), AllOf(HasSubstr("this model lacks the source's 'unit4.bias', "
                                                  "'unit4.weight'"),
                                        Not(HasSubstr("the source lacks"))));
}

TEST_F(PartialLoad, TakesOtherNamesWithEveryBitAndItsSteps) {
  ModelSpec model = small_model();
  for (UnitSpec& unit : model.units) {
    for (ParamSpec& param : unit.params) param.name = "model." + param.name;
  }
  const Loaded loaded = load(model, {.renames = {{"*", "model.*"}}});
  EXPECT_EQ(loaded.engine->generation(), 2U);
  EXPECT_TRUE(same_params(*loaded.engine, plain_, small_model()));
  train_step(*loaded.engine, model, 2, kLearningRate);
  plain_.step(2, kLearningRate);
  EXPECT_TRUE(same_params(*loaded.engine, plain_, small_model())) << "moments came too";
}

TEST_F(PartialLoad, LeavesInitialValuesWhereTheStateHasNone) {
  ModelSpec model = another_model();
  model.units[1].params[0].shape = {128, 128};
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kSplit, StateFormat::k8Bit}) {
    SCOPED_TRACE(to_string(format));
    const Loaded loaded = load(
        model, {.renames = {{"unit0.weight", "first.weight"}}, .initialize = initialize}, format);
    EXPECT_THAT(
        loaded.engine->description(),
        Contains(HasSubstr("the source lacks 'first.bias', 'more.weight', which keep their initial "
                           "values")));
    EXPECT_THAT(loaded.engine->description(),
                Contains(HasSubstr(
                    "this model lacks the source's 'unit0.bias', 'unit4.bias', 'unit4.weight'")));
    EXPECT_EQ(loaded.engine->generation(), 2U);
    const auto initial = [](UnitId unit, std::uint64_t count) {
      std::vector<float> values(count);
      initialize(unit, 0, values);
      return values;
    };
    std::vector<float> first = plain_.master(0);  // its weight was loaded, its bias was not
    const std::vector<float> fresh = initial(0, first.size());
    const auto bias = static_cast<std::ptrdiff_t>(small_model().units[0].params[0].count());
    std::copy(fresh.begin() + bias, fresh.end(), first.begin() + bias);
    EXPECT_EQ(master_of(*loaded.engine, 0), first);
    for (const UnitId unit : {1U, 2U, 3U})
      EXPECT_EQ(master_of(*loaded.engine, unit), plain_.master(unit)) << unit;
    EXPECT_EQ(master_of(*loaded.engine, 4), initial(4, 40 * 128));
  }
}

TEST_F(PartialLoad, RefusesRulesThatMeanNothingOrTwoThings) {
  EXPECT_THAT(refusal(small_model(), {.renames = {{"unit9.weight", "x"}}}),
              HasSubstr("has no parameter called 'unit9.weight'"));
  EXPECT_THAT(refusal(small_model(), {.renames = {{"unit0.weight", "unit1.weight"}}}),
              AllOf(HasSubstr("'unit0.weight' and 'unit1.weight'"),
                    HasSubstr("both be loaded as 'unit1.weight'")));
}

}  // namespace load_options_test
}  // namespace ziggurat::testing
