// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_interface_test.cc: libziggurat.so from outside: it makes the steps of the
// kernels over plain arrays, and misuse is an error that changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "optimizer/update.h"
#include "tests/support/scratch_directory.h"
#include "tiers/record_hash.h"

namespace {

using testing::HasSubstr;
using ziggurat::kTileElements;

constexpr std::uint64_t kCount = 3 * 5 * 7;

ziggurat_memory memory_of(std::vector<float>& values) {
  ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
  its.address = values.data();
  its.size_bytes = values.size() * sizeof(float);
  return its;
}

/// Two parameters, each in a group of its own.
class CInterface : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(ziggurat_runtime_create(R"({"threads": 1})", &runtime_), ZIGGURAT_OK);
    for (std::size_t p = 0; p < 2; ++p) {
      for (std::uint64_t i = 0; i < kCount; ++i)
        values_[p].push_back(0.01F * static_cast<float>(i) - 0.3F * static_cast<float>(p));
      params_[p] = ZIGGURAT_INIT(ziggurat_param);
      params_[p].name = p == 0 ? "first" : "second";
      params_[p].group = static_cast<std::uint32_t>(p);
      params_[p].shape = shape_.data();
      params_[p].dimensions = static_cast<std::uint32_t>(shape_.size());
      params_[p].values = memory_of(values_[p]);
      groups_[p] = ZIGGURAT_INIT(ziggurat_group);
      groups_[p].learning_rate = p == 0 ? 0.01F : 0.02F;
      groups_[p].beta1 = 0.9F;
      groups_[p].beta2 = 0.99F;
      groups_[p].eps = 1e-8F;
      groups_[p].weight_decay = p == 0 ? 0.1F : 0.0F;
    }
  }
  void TearDown() override {
    if (engine_ != 0) {
      EXPECT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);
    }
    EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK);
  }

  std::string settings(const std::string& more = "") const {
    return R"({"store": ")" + directory_.path() + "/store\"" + more + "}";
  }
  ziggurat_status open(const std::string& text) {
    return ziggurat_engine_open(runtime_, params_.data(), params_.size(), text.c_str(), &engine_);
  }
  static std::vector<float> gradient_of(std::size_t param, int step) {
    std::vector<float> values;
    for (std::uint64_t i = 0; i < kCount; ++i)
      values.push_back(static_cast<float>((i * 7 + static_cast<unsigned>(step) * 3 + param) % 11) -
                       5.0F);
    return values;
  }
  ziggurat_status put(std::size_t param, std::vector<float> gradient) const {
    const ziggurat_memory memory = memory_of(gradient);
    return ziggurat_put_gradient(engine_, param, &memory);
  }
  ziggurat_step_options options() const {
    ziggurat_step_options its = ZIGGURAT_INIT(ziggurat_step_options);
    its.groups = groups_.data();
    its.group_count = static_cast<std::uint32_t>(groups_.size());
    return its;
  }
  ziggurat_status step() {
    const ziggurat_step_options its = options();
    return ziggurat_step(engine_, &its, &result_);
  }
  std::vector<float> read(std::size_t param) const {
    std::vector<float> values(kCount);
    const ziggurat_memory memory = memory_of(values);
    EXPECT_EQ(ziggurat_read_param(engine_, param, &memory), ZIGGURAT_OK) << ziggurat_last_error();
    return values;
  }

  const ziggurat::testing::ScratchDirectory directory_;
  ziggurat_runtime runtime_ = 0;
  ziggurat_engine engine_ = 0;
  const std::array<std::int64_t, 3> shape_{3, 5, 7};
  std::array<std::vector<float>, 2> values_;
  std::array<ziggurat_param, 2> params_{};
  std::array<ziggurat_group, 2> groups_{};
  ziggurat_step_result result_ = ZIGGURAT_INIT(ziggurat_step_result);
};

/// The update's own kernel over a padded record in plain memory.
class PlainParam {
 public:
  PlainParam(const std::vector<float>& values, const ziggurat_group& group)
      : group_(group), record_(3 * kTileElements * sizeof(float)), param_(kTileElements) {
    std::memcpy(record_.data(), values.data(), values.size() * sizeof(float));
  }
  void step(const std::vector<float>& gradient, std::uint64_t t) {
    std::vector<float> padded = gradient;
    padded.resize(kTileElements);
    const auto scalars = ziggurat::OptimizerStep::make({.learning_rate = group_.learning_rate,
                                                        .beta1 = group_.beta1,
                                                        .beta2 = group_.beta2,
                                                        .eps = group_.eps,
                                                        .weight_decay = group_.weight_decay,
                                                        .grad_scale = 1.0F,
                                                        .t = t});
    const std::array<ziggurat::DecayRun, 1> runs{
        {{.begin = 0, .end = kTileElements, .decay = true}}};
    ziggurat::update_record(scalars,
                            {.record = record_,
                             .grad = ziggurat::as_typed(std::span<const float>(padded)),
                             .param = ziggurat::as_typed(std::span<float>(param_))},
                            runs);
  }
  std::vector<float> values() const { return {param_.begin(), param_.begin() + kCount}; }

 private:
  ziggurat_group group_;
  std::vector<std::byte> record_;
  std::vector<float> param_;
};

TEST_F(CInterface, MakesTheStepsOfPlainArraysOnEveryTier) {
  for (const char* tier : {"nvme", "host"}) {
    ASSERT_EQ(open(settings(std::string(R"(, "resume": "never", "placement": "optimizer=)") + tier +
                            "\"")),
              ZIGGURAT_OK)
        << ziggurat_last_error();
    std::vector<PlainParam> plain{{values_[0], groups_[0]}, {values_[1], groups_[1]}};
    for (int i = 1; i <= 4; ++i) {
      for (const std::size_t p : {1U, 0U}) {
        EXPECT_EQ(put(p, gradient_of(p, i)), ZIGGURAT_OK);
        plain[p].step(gradient_of(p, i), static_cast<std::uint64_t>(i));
      }
      ASSERT_EQ(step(), ZIGGURAT_OK) << ziggurat_last_error();
      EXPECT_EQ(result_.generation, static_cast<std::uint64_t>(i));
    }
    EXPECT_EQ(read(0), plain[0].values()) << tier;
    EXPECT_EQ(read(1), plain[1].values()) << tier;
    EXPECT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);
    engine_ = 0;
  }
}

/// ziggurat_group as a caller was compiled with that knows nothing of what came after the decay.
struct OlderGroup {
  std::uint32_t struct_size;
  float learning_rate, beta1, beta2, eps, weight_decay;
};

/// Two steps of SGD in numbers that fp32 holds exactly. Without dampening and flags: as an older
/// caller's.
std::vector<float> two_steps(const ziggurat_group& group, std::vector<float> values,
                             const std::vector<float>& first, const std::vector<float>& second) {
  const float sign = (group.flags & ZIGGURAT_MAXIMIZE) != 0 ? -1.0F : 1.0F;
  const bool nesterov = (group.flags & ZIGGURAT_NESTEROV) != 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    float momentum = 0;
    for (const bool is_first : {true, false}) {
      const float g = sign * (is_first ? first : second)[i];
      momentum = group.beta1 * momentum + (is_first ? 1 : 1 - group.dampening) * g;
      values[i] -= group.learning_rate * (nesterov ? g + group.beta1 * momentum : momentum);
    }
  }
  return values;
}

TEST_F(CInterface, TakesDampeningAndFlagsAndCallersThatHaveNeither) {
  std::array<OlderGroup, 2> older{};
  for (std::size_t p = 0; p < 2; ++p) {
    for (std::uint64_t i = 0; i < kCount; ++i) values_[p][i] = static_cast<float>(i);
    groups_[p] = ZIGGURAT_INIT(ziggurat_group);
    groups_[p].learning_rate = 0.5F;
    groups_[p].beta1 = p == 0 ? 0.5F : 0.25F;
    older[p] = {sizeof(OlderGroup), 0.5F, groups_[p].beta1, 0, 0, 0};
  }
  for (const bool is_older : {false, true}) {
    if (!is_older) {
      groups_[0].dampening = 0.25F;
      groups_[0].flags = ZIGGURAT_MAXIMIZE;
      groups_[1].flags = ZIGGURAT_NESTEROV;
    }
    ASSERT_EQ(open(settings(R"(, "resume": "never", "optimizer": "sgd")")), ZIGGURAT_OK)
        << ziggurat_last_error();
    ziggurat_step_options its = options();
    if (is_older) its.groups = reinterpret_cast<const ziggurat_group*>(older.data());
    for (const int i : {1, 2}) {
      for (const std::size_t p : {0U, 1U}) EXPECT_EQ(put(p, gradient_of(p, i)), ZIGGURAT_OK);
      ASSERT_EQ(ziggurat_step(engine_, &its, &result_), ZIGGURAT_OK) << ziggurat_last_error();
    }
    for (const std::size_t p : {0U, 1U}) {
      ziggurat_group group = groups_[p];
      if (is_older) {
        group.dampening = 0;
        group.flags = 0;
      }
      EXPECT_EQ(read(p), two_steps(group, values_[p], gradient_of(p, 1), gradient_of(p, 2))) << p;
    }
    EXPECT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);
    engine_ = 0;
  }
}

TEST_F(CInterface, AddsGradientsUpUntilTheStep) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  PlainParam plain(values_[0], groups_[0]);
  std::vector<float> sum = gradient_of(0, 1);
  for (std::size_t i = 0; i < kCount; ++i) sum[i] += gradient_of(0, 2)[i];
  plain.step(sum, 1);
  put(0, gradient_of(0, 1));
  put(1, gradient_of(1, 1));
  put(0, gradient_of(0, 2));
  ASSERT_EQ(step(), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_EQ(read(0), plain.values());
}

TEST_F(CInterface, ResumesWithTheBlobOfTheStep) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  put(0, gradient_of(0, 1));
  put(1, gradient_of(1, 1));
  const std::string blob = "where the loader stood";
  ziggurat_step_options with_blob = options();
  with_blob.blob = blob.data();
  with_blob.blob_bytes = blob.size();
  ASSERT_EQ(ziggurat_step(engine_, &with_blob, &result_), ZIGGURAT_OK) << ziggurat_last_error();
  const std::vector<float> before = read(0);
  ASSERT_EQ(ziggurat_make_durable(engine_), ZIGGURAT_OK);
  ASSERT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);

  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  ziggurat_state state = ZIGGURAT_INIT(ziggurat_state);
  ASSERT_EQ(ziggurat_engine_state(engine_, &state), ZIGGURAT_OK);
  EXPECT_EQ(state.resumed, 1);
  EXPECT_EQ(state.generation, 1U);
  EXPECT_EQ(state.durable_generation, 1U);
  std::string resumed(state.blob_bytes, '\0');
  ASSERT_EQ(ziggurat_read_blob(engine_, resumed.data(), resumed.size()), ZIGGURAT_OK);
  EXPECT_EQ(resumed, blob);
  EXPECT_EQ(read(0), before);
}

TEST_F(CInterface, SkipsAStepThatOverflowedUnderALossScale) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  std::vector<float> overflowed = gradient_of(0, 1);
  overflowed[5] = std::numeric_limits<float>::infinity();
  put(0, overflowed);
  put(1, gradient_of(1, 1));
  ziggurat_step_options scaled = options();
  scaled.loss_scale = 1024;
  ASSERT_EQ(ziggurat_step(engine_, &scaled, &result_), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_EQ(result_.skipped, 1);
  EXPECT_EQ(read(0), values_[0]);
}

#define EXPECT_REFUSED(call, words)                       \
  do {                                                    \
    EXPECT_EQ(call, ZIGGURAT_INVALID_ARGUMENT);           \
    EXPECT_THAT(ziggurat_last_error(), HasSubstr(words)); \
  } while (false)

TEST_F(CInterface, RefusesSettingsThatMakeNoRunByTheirName) {
  EXPECT_REFUSED(open("{"), "settings");
  EXPECT_REFUSED(open("{}"), "\"store\": a directory is needed");
  EXPECT_REFUSED(open(R"({"store": 7})"), "setting \"store\": 7");
  EXPECT_REFUSED(open(settings(R"(, "slotz": 1)")), "did you mean \"slots\"?");
  EXPECT_REFUSED(open(settings(R"(, "slots": "two")")), "slots");
  EXPECT_REFUSED(open(settings(R"(, "slots": 3)")), "setting \"slots\": 3");
  EXPECT_REFUSED(ziggurat_runtime_create(R"({"threads": -1})", &runtime_), "threads");
  ASSERT_EQ(ziggurat_runtime_create(nullptr, &runtime_), ZIGGURAT_OK);
}

TEST_F(CInterface, RefusesParametersThatMakeNoModel) {
  const std::array<ziggurat_param, 2> good = params_;
  params_[1].name = "first";
  EXPECT_REFUSED(open(settings()), "two parameters have the name 'first'");
  params_[1].name = nullptr;
  EXPECT_REFUSED(open(settings()), "param.name is null");
  params_ = good;
  params_[1].dimensions = 2;
  EXPECT_REFUSED(open(settings()), "'second' has 15 elements by its shape, and 105 in memory");
  params_ = good;
  params_[0].values.dtype = 9;
  EXPECT_REFUSED(open(settings()), "param.values.dtype is 9");
  params_ = good;
  params_[0].values.address = nullptr;
  EXPECT_REFUSED(open(settings()), "param.values is null");
  params_ = good;
  params_[0].struct_size = 1;
  EXPECT_REFUSED(open(settings()), "struct_size");
  params_ = good;
  EXPECT_REFUSED(ziggurat_engine_open(runtime_, nullptr, 0, settings().c_str(), &engine_),
                 "a model without parameters");
  EXPECT_REFUSED(ziggurat_engine_open(runtime_, nullptr, 2, settings().c_str(), &engine_),
                 "params is null");
}

TEST_F(CInterface, RefusesCallsThatMakeNoSenseAndGoesOn) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_REFUSED(step(), "before parameter 0 'first' had a gradient");
  EXPECT_REFUSED(put(2, gradient_of(0, 1)), "put_gradient(parameter 2): the model has 2");
  EXPECT_REFUSED(put(0, {1, 2, 3}), "3 elements, and it has 105");
  EXPECT_REFUSED(ziggurat_put_gradient(engine_, 0, nullptr), "gradient is null");
  EXPECT_REFUSED(ziggurat_step(engine_, nullptr, &result_), "options is null");
  std::vector<float> few(3);
  const ziggurat_memory memory = memory_of(few);
  EXPECT_REFUSED(ziggurat_read_param(engine_, 0, &memory), "3 elements, and it has 105");

  put(0, gradient_of(0, 1));
  put(1, gradient_of(1, 1));
  ziggurat_step_options one_group = options();
  one_group.group_count = 1;
  EXPECT_REFUSED(ziggurat_step(engine_, &one_group, &result_),
                 "1 groups of settings for a model of 2");
  EXPECT_EQ(read(0), values_[0]);

  put(0, gradient_of(0, 1));
  put(1, gradient_of(1, 1));
  ASSERT_EQ(step(), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_NE(read(0), values_[0]);
}

TEST_F(CInterface, RefusesWhatItsOptimizerHasNot) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  const auto both_steps = [&] {
    put(0, gradient_of(0, 1));
    put(1, gradient_of(1, 1));
    return step();
  };
  groups_[1].flags = 4 | ZIGGURAT_MAXIMIZE;
  EXPECT_REFUSED(both_steps(), "groups.flags is 0x6");
  groups_[1].flags = ZIGGURAT_NESTEROV;
  EXPECT_REFUSED(both_steps(), "dampening and nesterov are sgd's alone");
  groups_[1].flags = 0;
  groups_[1].dampening = std::numeric_limits<float>::quiet_NaN();
  EXPECT_REFUSED(both_steps(), "finite learning rate, decay and dampening");
  EXPECT_EQ(read(0), values_[0]);
  ASSERT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);
  engine_ = 0;
  EXPECT_REFUSED(open(settings(R"(, "resume": "never", "initial_accumulator": 0.5)")),
                 "only adagrad has one");
}

TEST_F(CInterface, KnowsNoHandleThatIsGone) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  EXPECT_REFUSED(ziggurat_runtime_destroy(runtime_), "close them first");
  const ziggurat_engine gone = engine_;
  ASSERT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);
  EXPECT_REFUSED(ziggurat_make_durable(gone), "there is no engine");
  EXPECT_REFUSED(ziggurat_engine_close(gone), "there is no engine");
  EXPECT_REFUSED(ziggurat_make_durable(0), "there is no engine 0");
  EXPECT_REFUSED(ziggurat_runtime_destroy(77), "there is no runtime 77");
  engine_ = 0;
}

}  // namespace
