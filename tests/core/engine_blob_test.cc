// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_blob_test.cc: a step whose blob comes later is trained on from at once, and is
// durable with its blob or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "base/error.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace engine_blob_test {

using ::testing::HasSubstr;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
std::string text_of(std::span<const std::byte> blob) {
  return {reinterpret_cast<const char*>(blob.data()), blob.size()};
}

/// The words with which a call is refused.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    return error.what();
  }
  return "done";
}

struct Tiers {
  const char* name;
  const char* placement;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kNever;
};

class EngineBlob : public ::testing::TestWithParam<Tiers> {
 protected:
  EngineConfig config() const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam().placement);
    config.speculation = GetParam().speculation;
    return config;
  }
  StepResult step(Engine& engine, std::uint64_t step) const {
    pass_step(engine, model_, step, 0.01F);
    return engine.step({.learning_rate = 0.01F, .blob = {}, .blob_follows = true});
  }
  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
};

TEST_P(EngineBlob, ComesWhileTheNextStepIsUnderWay) {
  PlainTraining plain(model_, 1.0F);
  {
    Rig rig(model_, config());
    for (std::uint64_t s = 0; s < 4; ++s) {
      pass_step(*rig.engine, model_, s, 0.01F);
      if (s > 0) rig.engine->give_blob(bytes_of("after " + std::to_string(s)));
      rig.engine->step({.learning_rate = 0.01F, .blob = {}, .blob_follows = true});
      plain.step(s, 0.01F);
      EXPECT_TRUE(same_params(*rig.engine, plain, model_)) << "the update waits for no blob";
      EXPECT_LE(rig.engine->durable_generation(), s);
    }
    rig.engine->give_blob(bytes_of("after 4"));
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), 4U);
  }
  const Rig rig(model_, config());
  EXPECT_EQ(rig.engine->generation(), 4U);
  EXPECT_EQ(text_of(rig.engine->resumed_blob()), "after 4");
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
}

TEST_P(EngineBlob, ThatNeverComesLeavesTheStepBefore) {
  PlainTraining plain(model_, 1.0F);
  {
    Rig rig(model_, config());
    step(*rig.engine, 0);
    plain.step(0, 0.01F);
    rig.engine->give_blob(bytes_of("kept"));
    rig.engine->make_durable();
    step(*rig.engine, 1);
  }
  const Rig rig(model_, config());
  EXPECT_EQ(rig.engine->generation(), 1U);
  EXPECT_EQ(text_of(rig.engine->resumed_blob()), "kept");
  EXPECT_TRUE(same_params(*rig.engine, plain, model_));
}

TEST_P(EngineBlob, IsAskedForBeforeWhatNeedsIt) {
  EngineConfig settings = config();
  settings.checkpoint.saves = true;
  Rig rig(model_, settings);
  EXPECT_THAT(refusal([&] { rig.engine->give_blob({}); }), HasSubstr("does not wait for a blob"));
  step(*rig.engine, 0);
  const std::string first = "call give_blob() first";
  EXPECT_THAT(refusal([&] { rig.engine->make_durable(); }), HasSubstr(first));
  CheckpointRequest request{.folder = directory_.path() + "/saved", .resume = {}};
  EXPECT_THAT(refusal([&] { rig.engine->save_checkpoint(request); }), HasSubstr(first));
  pass_step(*rig.engine, model_, 1, 0.01F);
  StepOptions options{.learning_rate = 0.01F, .blob = {}, .blob_follows = true};
  EXPECT_THAT(refusal([&] { rig.engine->step(options); }), HasSubstr(first));
  rig.engine->give_blob(bytes_of("first"));
  options.checkpoint = &request;
  EXPECT_THAT(refusal([&] { rig.engine->step(options); }), HasSubstr("must not follow"));
  options.checkpoint = nullptr;
  EXPECT_EQ(rig.engine->step(options).generation, 2U);
  rig.engine->give_blob(bytes_of("second"));
  rig.engine->save_checkpoint(request);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, EngineBlob,
                         ::testing::Values(Tiers{"Demo", "params=host,grads=host,optimizer=nvme"},
                                           Tiers{"AllNvme", "all=nvme"},
                                           Tiers{"AllHost", "all=host"},
                                           Tiers{"Guessing",
                                                 "params=host,grads=host,optimizer=nvme",
                                                 EngineConfig::Speculation::kAlways}),
                         [](const auto& its) { return std::string(its.param.name); });

}  // namespace engine_blob_test
}  // namespace ziggurat::testing
