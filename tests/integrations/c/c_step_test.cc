// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_step_test.cc: what a step through the C interface does to parameters and
// gradients that are lent: the bits of the kernels over plain arrays.
#include <cmath>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_step_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// On NVMe beside a store, and on the host alone. Formats and tiers are compared in
/// tests/core/lent_engine_test.cc (LentBits).
class CStep : public Embedder, public ::testing::WithParamInterface<const char*> {
 protected:
  void open_here(const std::string& more = "") {
    const std::string text = GetParam() == std::string("nvme")
                                 ? settings(more)
                                 : "{\"placement\": \"optimizer=host\"" + more + "}";
    ASSERT_EQ(open(text), ZIGGURAT_OK) << ziggurat_last_error();
  }
  std::vector<PlainParam> plain(StateKind state = {}) const {
    return {PlainParam(values_[0], state), PlainParam(values_[1], state)};
  }
  void expect_equal(const std::vector<PlainParam>& expected) {
    for (std::size_t p = 0; p < kParams; ++p)
      EXPECT_EQ(updated(p), expected[p].values()) << "parameter " << p;
  }
};

INSTANTIATE_TEST_SUITE_P(Tiers, CStep, ::testing::Values("nvme", "memory"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(CStep, MakesTheStepsOfPlainArrays) {
  open_here();
  std::vector<PlainParam> expected = plain();
  for (std::uint64_t t = 1; t <= 4; ++t) {
    ASSERT_DONE(ziggurat_expect_gradients(engine_));
    lend_both(t);
    ASSERT_DONE(step());
    EXPECT_EQ(result_.generation, t);
    for (std::size_t p = 0; p < kParams; ++p) expected[p].step(scalars(p, t), gradient_of(p, t));
    if (t == 2) expect_equal(expected);  // otherwise a step waits for the one before by itself
  }
  ASSERT_DONE(ziggurat_wait(engine_, ZIGGURAT_ALL_PARAMS));
  expect_equal(expected);
}

TEST_P(CStep, TakesAllGradientsInOneCall) {
  open_here();
  std::vector<PlainParam> expected = plain();
  for (std::uint64_t t = 1; t <= 2; ++t) {
    // Their types and their order are others than the parameters'.
    TypedArray second = gradient_of(1, t, DType::kBFloat16);
    TypedArray first = gradient_of(0, t);
    const std::array<std::uint64_t, kParams> params{1, 0};
    const std::array<void*, kParams> addresses{second.bytes.data(), first.bytes.data()};
    const std::array<ziggurat_dtype, kParams> dtypes{ZIGGURAT_BF16, ZIGGURAT_FP32};
    const std::array<float, kParams> scales{0.5F, 2.0F};
    ASSERT_DONE(ziggurat_lend_gradients(engine_, kParams, params.data(), addresses.data(),
                                        dtypes.data(), scales.data()));
    ASSERT_DONE(step());
    ASSERT_DONE(ziggurat_wait(engine_, ZIGGURAT_ALL_PARAMS));
    expected[0].step(scalars(0, t, 2.0F), gradient_of(0, t));
    expected[1].step(scalars(1, t, 0.5F), gradient_of(1, t));
  }
  expect_equal(expected);
}

TEST_P(CStep, TakesNoneOfManyGradientsWhereOneIsWrong) {
  open_here();
  TypedArray first = gradient_of(0, 1);
  const std::array<std::uint64_t, 2> params{0, 7};
  const std::array<void*, 2> addresses{first.bytes.data(), first.bytes.data()};
  const auto lend_all = [&] {
    return ziggurat_lend_gradients(engine_, 2, params.data(), addresses.data(), nullptr, nullptr);
  };
  EXPECT_REFUSED(lend_all(), "lend_gradients(parameter 7): the model has 2");
  EXPECT_REFUSED(ziggurat_lend_gradients(engine_, 1, params.data(), nullptr, nullptr, nullptr),
                 "addresses is null");
  const std::array<std::uint64_t, 2> both{0, 1};
  const std::array<ziggurat_dtype, 2> dtypes{ZIGGURAT_FP32, 77};
  std::array<void*, 2> given{first.bytes.data(), nullptr};
  const auto lend_given = [&](const ziggurat_dtype* types) {
    return ziggurat_lend_gradients(engine_, 2, both.data(), given.data(), types, nullptr);
  };
  EXPECT_REFUSED(lend_given(nullptr), "lend_gradients(parameter 1 'second'): gradient is null");
  EXPECT_REFUSED(lend_given(dtypes.data()), "lend_gradients(parameter 1 'second'): gradient.dtype");
  given[1] = first.bytes.data() + 1;
  EXPECT_REFUSED(lend_given(nullptr),
                 "(parameter 1 'second'): gradient is not aligned to its fp32 "
                 "elements: give an address that 4 divides");
  const std::vector<PlainParam> expected = plain();
  ASSERT_DONE(step());
  expect_equal(expected);
  EXPECT_EQ(steps_of(0), 0U);
}

TEST_P(CStep, LeavesAParameterWithoutAGradientAlone) {
  open_here();
  std::vector<PlainParam> expected = plain();
  const auto one = [&](std::uint64_t generation, std::size_t param, std::uint64_t t) {
    ASSERT_DONE(lend(param, gradient_of(param, generation)));
    expected[param].step(scalars(param, t), gradient_of(param, generation));
  };
  one(1, 0, 1);
  ASSERT_DONE(step());
  expect_equal(expected);  // no decay either
  one(2, 0, 2);
  one(2, 1, 1);
  ASSERT_DONE(step());
  one(3, 1, 2);
  ASSERT_DONE(step());
  ASSERT_DONE(step());
  one(5, 0, 3);
  ASSERT_DONE(step());
  EXPECT_EQ(result_.generation, 5U);
  expect_equal(expected);
  EXPECT_EQ(steps_of(0), 3U);
  EXPECT_EQ(steps_of(1), 2U);
}

TEST_P(CStep, KeepsEachParameterInItsOwnType) {
  set_values(1, initial(1, DType::kBFloat16));
  open_here(R"(, "state_format": "8bit")");
  std::vector<PlainParam> expected = plain({.format = StateFormat::k8Bit});
  for (std::uint64_t t = 1; t <= 3; ++t) {
    const std::array<TypedArray, 2> gradients{gradient_of(0, t),
                                              gradient_of(1, t, DType::kBFloat16)};
    for (std::size_t p = 0; p < kParams; ++p) {
      ASSERT_DONE(lend(p, gradients[p]));
      expected[p].step(scalars(p, t), gradients[p]);
    }
    ASSERT_DONE(step());
  }
  expect_equal(expected);
}

TEST_P(CStep, TakesGradientsOfAnyType) {
  set_values(0, initial(0, DType::kBFloat16));
  open_here();
  std::vector<PlainParam> expected = plain();
  std::uint64_t t = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    ++t;
    for (std::size_t p = 0; p < kParams; ++p) {
      ASSERT_DONE(lend(p, gradient_of(p, t, dtype), 0.25F));
      expected[p].step(scalars(p, t, 0.25F), gradient_of(p, t, dtype));
    }
    ASSERT_DONE(step());
  }
  expect_equal(expected);
}

TEST_P(CStep, AddsGradientsInFp32AndGivesTheirMemoryBack) {
  open_here();
  std::vector<PlainParam> expected = plain();
  for (std::uint64_t t = 1; t <= 2; ++t) {
    // None of the sums is a number of bf16.
    TypedArray lent = gradient_of(0, t, DType::kBFloat16);
    TypedArray added = gradient_of(0, t + 7, DType::kFloat16);
    TypedArray again(DType::kFloat32, std::vector<float>(kCounts[0], 0.001F));
    TypedArray sum(DType::kFloat32, kCounts[0]);
    for (std::size_t i = 0; i < sum.count(); ++i)
      sum.set(i, 0.5F * lent.at(i) + 3.0F * added.at(i) + 1.0F * again.at(i));
    const ziggurat_memory memory = memory_of(lent);
    ASSERT_DONE(ziggurat_lend_gradient(engine_, 0, &memory, 0.5F));
    ASSERT_DONE(add(0, added, 3.0F));
    ASSERT_DONE(add(0, again));
    for (TypedArray* used : {&lent, &added, &again})
      std::ranges::fill(used->bytes, std::byte{0x7f});
    TypedArray alone = gradient_of(1, t);
    ASSERT_DONE(add(1, alone));  // the first that it has
    std::ranges::fill(alone.bytes, std::byte{0x7f});
    ASSERT_DONE(step());
    expected[0].step(scalars(0, t), sum);
    expected[1].step(scalars(1, t), gradient_of(1, t));
  }
  expect_equal(expected);
}

TEST_P(CStep, ALaterLoanReplacesTheOneBefore) {
  open_here();
  std::vector<PlainParam> expected = plain();
  TypedArray other = gradient_of(0, 9);
  ASSERT_DONE(lend(0, gradient_of(0, 8)));
  ASSERT_DONE(add(0, other));
  ASSERT_DONE(lend(0, gradient_of(0, 1), 2.0F));
  ASSERT_DONE(step());
  expected[0].step(scalars(0, 1, 2.0F), gradient_of(0, 1));
  expect_equal(expected);
}

TEST_P(CStep, ClipsByTheNormThatItIsAskedFor) {
  open_here();
  std::vector<PlainParam> expected = plain();
  double squared = 0;
  for (std::size_t p = 0; p < kParams; ++p) {
    const TypedArray gradient = gradient_of(p, 1);
    for (std::size_t i = 0; i < gradient.count(); ++i) {
      const double value = 0.5 * static_cast<double>(gradient.at(i));
      squared += value * value;  // exact
    }
    ASSERT_DONE(lend(p, gradient, 0.5F));
  }
  double norm = 0;
  ASSERT_DONE(ziggurat_gradient_norm(engine_, &norm));
  EXPECT_EQ(norm, std::sqrt(squared));
  ziggurat_step_options clipped = options();
  clipped.grad_scale = static_cast<float>(1.0 / norm);
  ASSERT_DONE(step(clipped));
  for (std::size_t p = 0; p < kParams; ++p)
    expected[p].step(scalars(p, 1, clipped.grad_scale * 0.5F), gradient_of(p, 1));
  expect_equal(expected);
}

TEST_P(CStep, TellsByTheNormWhatIsNotFiniteAndForgetsWhatIsDiscarded) {
  open_here();
  const std::vector<PlainParam> expected = plain();
  double norm = 0;
  for (const float value : {kInfinity, kNaN}) {
    TypedArray wild = gradient_of(1, 1);
    wild.set(39'999, value);
    lend_both(1);
    ASSERT_DONE(lend(1, wild));
    ASSERT_DONE(ziggurat_gradient_norm(engine_, &norm));
    EXPECT_FALSE(std::isfinite(norm)) << value;
    ASSERT_DONE(ziggurat_discard_gradients(engine_));
  }
  ASSERT_DONE(ziggurat_gradient_norm(engine_, &norm));
  EXPECT_EQ(norm, 0.0);
  ASSERT_DONE(step());
  expect_equal(expected);
  EXPECT_EQ(steps_of(0), 0U);
}

TEST_P(CStep, TakesMastersAnewFromAParameterThatWasWritten) {
  open_here();
  std::vector<PlainParam> expected = plain();
  const auto both = [&](std::uint64_t t) {
    lend_both(t);
    ASSERT_DONE(step());
    for (std::size_t p = 0; p < kParams; ++p) expected[p].step(scalars(p, t), gradient_of(p, t));
  };
  both(1);
  ASSERT_DONE(ziggurat_expect_gradients(engine_));  // records may be read before it is known
  for (std::size_t p = 0; p < kParams; ++p) {
    ASSERT_DONE(ziggurat_wait(engine_, p));
    for (std::size_t i = 0; i < kCounts[p]; i += 3) values_[p].set(i, 0.123F);
    expected[p].write(values_[p]);
    ASSERT_DONE(ziggurat_param_written(engine_, p));
  }
  both(2);
  both(3);
  expect_equal(expected);
}

TEST_P(CStep, TakesMastersAnewWithoutAGradientToo) {
  open_here();
  std::vector<PlainParam> expected = plain();
  const TypedArray own(DType::kFloat32, std::vector<float>(kCounts[1], 0.75F));
  std::ranges::copy(own.bytes, values_[1].bytes.begin());
  expected[1].write(own);
  ASSERT_DONE(ziggurat_param_written(engine_, 1));
  ASSERT_DONE(step());
  EXPECT_EQ(updated(1), own);
  EXPECT_EQ(steps_of(1), 0U);
  lend_both(2);
  ASSERT_DONE(step());
  for (std::size_t p = 0; p < kParams; ++p) expected[p].step(scalars(p, 1), gradient_of(p, 2));
  expect_equal(expected);
}

TEST_P(CStep, FollowsAParameterThatWasMoved) {
  open_here();
  std::vector<PlainParam> expected = plain();
  lend_both(1);
  ASSERT_DONE(step());
  TypedArray elsewhere = updated(1);
  const ziggurat_memory memory = memory_of(elsewhere);
  ASSERT_DONE(ziggurat_lend_param(engine_, 1, &memory));
  const TypedArray left = values_[1];
  lend_both(2);
  ASSERT_DONE(step());
  for (std::uint64_t t = 1; t <= 2; ++t) expected[1].step(scalars(1, t), gradient_of(1, t));
  ASSERT_DONE(ziggurat_wait(engine_, 1));
  EXPECT_EQ(elsewhere, expected[1].values());
  EXPECT_EQ(values_[1], left);
  close();  // before what is lent is gone
}

TEST_P(CStep, DividesTheLearningRateByTheParametersOwnSteps) {
  open_here(R"(, "optimizer": "adagrad")");
  std::vector<PlainParam> expected = plain({.optimizer = OptimizerKind::kAdagrad});
  for (ziggurat_group& group : groups_) group.lr_decay = 0.5F;
  for (std::uint64_t generation = 1; generation <= 4; ++generation) {
    for (std::size_t p = 0; p < kParams; ++p) {
      if (p == 1 && generation % 2 == 0) continue;
      const std::uint64_t t = p == 0 ? generation : (generation + 1) / 2;
      OptimizerStep::Settings slower = scalars(p, t);
      slower.learning_rate /= 1.0F + 0.5F * static_cast<float>(t - 1);
      ASSERT_DONE(lend(p, gradient_of(p, generation)));
      expected[p].step(slower, gradient_of(p, generation));
    }
    ASSERT_DONE(step());
  }
  expect_equal(expected);
}

TEST_P(CStep, ThatIsRefusedLeavesGradientsAndCountsAsTheyWere) {
  open_here();
  std::vector<PlainParam> expected = plain();
  lend_both(1);
  groups_[1].learning_rate = kNaN;
  EXPECT_REFUSED(step(), "no step can be made with the settings of 'second': learning rate nan");
  EXPECT_EQ(steps_of(1), 0U);
  EXPECT_EQ(state().generation, 0U);
  groups_[1].learning_rate = 0.02F;
  ziggurat_step_options wild = options();
  wild.grad_scale = kInfinity;
  EXPECT_REFUSED(step(wild), "gradient scale inf");
  ASSERT_DONE(step());
  for (std::size_t p = 0; p < kParams; ++p) expected[p].step(scalars(p, 1), gradient_of(p, 1));
  expect_equal(expected);
  EXPECT_EQ(steps_of(1), 1U);
}

}  // namespace c_step_test
}  // namespace ziggurat::testing
