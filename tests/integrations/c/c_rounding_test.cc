// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_rounding_test.cc: how a store rounds goes with its checkpoints, and bf16
// parameters have the bits of a run that was not interrupted, whatever they were loaded from.
#include <fstream>
#include <sstream>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_rounding_test {

/// The two parameters in bf16.
class CRounding : public Embedder {
 protected:
  static constexpr const char* kStochastic = R"(, "param_rounding": "stochastic")";

  void SetUp() override {
    Embedder::SetUp();
    begin_again();
  }
  void begin_again() {
    for (std::size_t p = 0; p < kParams; ++p) set_values(p, initial(p, DType::kBFloat16));
  }
  std::string in_store(const std::string& name, const std::string& more) const {
    return R"({"store": ")" + directory_.path() + "/" + name + "\"" + more + "}";
  }
  void make_step(std::uint64_t t) {
    lend_both(t);
    ASSERT_DONE(step());
    ASSERT_DONE(ziggurat_wait(engine_, ZIGGURAT_ALL_PARAMS));
  }
  std::array<TypedArray, kParams> params() { return {updated(0), updated(1)}; }
  std::string folder() const { return directory_.path() + "/saved"; }

  ziggurat_status save(const std::vector<ziggurat_engine>& engines) {
    ziggurat_save_options options = ZIGGURAT_INIT(ziggurat_save_options);
    options.engine_count = static_cast<std::uint32_t>(engines.size());
    options.engines = engines.data();
    const std::string parts = engines.size() == 1
                                  ? R"([[{"param": 0, "first": 0}, {"param": 1, "first": 0}]])"
                                  : R"([[{"param": 0, "first": 0}, {"param": 1, "first": 0}],
                                        [null, null]])";
    const std::string content =
        R"({"folder": ")" + folder() +
        R"(", "step": 2, "keep_last": 0, "keep_every": 0, "model": "m", "dtype": "bf16",
            "placement": "nvme", "resume": {}, "values": [], "params": [
            {"name": "first", "shape": [3, 5, 7], "trained": true},
            {"name": "second", "shape": [200, 200], "trained": true}], "engines": )" +
        parts + "}";
    return ziggurat_save_checkpoint(runtime_, &options, content.c_str());
  }
  /// An engine of a new store whose state is the checkpoint's; the parameters were anything.
  void load(const std::string& text) {
    close();
    for (TypedArray& values : values_) std::ranges::fill(values.bytes, std::byte{0x55});
    ziggurat_checkpoint checkpoint = 0;
    ASSERT_DONE(ziggurat_checkpoint_open(runtime_, folder().c_str(), &checkpoint));
    ASSERT_DONE(ziggurat_engine_load(runtime_, params_.data(), kParams, text.c_str(), checkpoint,
                                     R"({"weights_only": false, "steps": [2, 2], "parts": [
            {"name": "first", "shape": [3, 5, 7], "first": 0},
            {"name": "second", "shape": [200, 200], "first": 0}]})",
                                     &engine_));
    ASSERT_DONE(ziggurat_checkpoint_close(checkpoint));
  }
  std::string manifest() const {
    std::stringstream text;
    text << std::ifstream(folder() + "/step-000000002/manifest.json").rdbuf();
    return text.str();
  }
};

TEST_F(CRounding, OfStateIsACheckpointsAndOfTheStoreThatIsLoadedFromIt) {
  const std::string kept = R"(, "state_format": "bf16-moments")";
  const std::string nearest = kept + R"(, "state_rounding": "nearest")";
  ASSERT_DONE(open(in_store("usual", nearest)));
  for (std::uint64_t t = 1; t <= 4; ++t) make_step(t);
  const std::array<TypedArray, kParams> expected = params();
  close();
  begin_again();
  ASSERT_DONE(open(in_store("saved", nearest)));
  for (std::uint64_t t = 1; t <= 2; ++t) make_step(t);
  ASSERT_DONE(save({engine_}));
  EXPECT_THAT(manifest(), ::testing::HasSubstr("\"state_rounding\""));
  load(in_store("loaded", kept));
  for (std::uint64_t t = 3; t <= 4; ++t) make_step(t);
  EXPECT_EQ(params(), expected);
  close();
  EXPECT_REFUSED(open(in_store("loaded", kept + R"(, "state_rounding": "stochastic")")),
                 "made with \"state_rounding\": \"nearest\"");
}

TEST_F(CRounding, OfParametersHasTheBitsOfARunThatWasNotInterrupted) {
  ASSERT_DONE(open(in_store("usual", kStochastic)));
  for (std::uint64_t t = 1; t <= 2; ++t) make_step(t);
  const std::array<TypedArray, kParams> at_two = params();
  ASSERT_DONE(save({engine_}));
  make_step(3);
  const std::array<TypedArray, kParams> at_three = params();
  load(in_store("loaded", ""));
  EXPECT_EQ(params(), at_two) << "as loaded";
  reopen(in_store("loaded", ""));
  EXPECT_EQ(params(), at_two) << "as resumed";
  make_step(3);
  EXPECT_EQ(params(), at_three);
}

TEST_F(CRounding, OfParametersCountsTheStepsThatTheTrainerSet) {
  const std::string text = in_store("one", kStochastic);
  ASSERT_DONE(open(text));
  make_step(1);
  std::vector<float> master(kCounts[1]);
  for (std::size_t i = 0; i < master.size(); ++i) master[i] = 0.001F * static_cast<float>(i % 997);
  ziggurat_memory memory = ZIGGURAT_INIT(ziggurat_memory);
  memory.address = master.data();
  memory.size_bytes = master.size() * sizeof(float);
  for (const bool written : {true, false}) {
    SCOPED_TRACE(written);
    if (written) {
      ASSERT_DONE(ziggurat_write_state(engine_, 1, "master", &memory));
    }
    ASSERT_DONE(ziggurat_set_param_steps(engine_, 1, written ? 70 : 80));
    ASSERT_DONE(lend(0, gradient_of(0, 2)));  // and none of the other
    ASSERT_DONE(step());
    const std::array<TypedArray, kParams> before = params();
    ASSERT_DONE(ziggurat_make_durable(engine_));
    reopen(text);
    EXPECT_EQ(params(), before);
  }
}

TEST_F(CRounding, IsOneOfACheckpoint) {
  ASSERT_DONE(open(in_store("one", "")));
  make_step(1);
  const ziggurat_engine nearest = engine_;
  ASSERT_DONE(open(in_store("other", kStochastic)));
  make_step(1);
  EXPECT_REFUSED(save({nearest, engine_}), "one \"param_rounding\"");
  ASSERT_DONE(ziggurat_engine_close(nearest));
}

}  // namespace c_rounding_test
}  // namespace ziggurat::testing
