// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/embedder.h: a trainer with two parameters behind the C interface, and what
// its steps make of them in plain arrays.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "tests/support/group_settings.h"
#include "tests/support/plain_param.h"
#include "tests/support/scratch_directory.h"
#include "tests/support/typed_array.h"

namespace ziggurat::testing {

/// `call` is an error of the caller's, in `words`.
#define EXPECT_REFUSED(call, words)                                  \
  do {                                                               \
    EXPECT_EQ(call, ZIGGURAT_INVALID_ARGUMENT);                      \
    EXPECT_THAT(ziggurat_last_error(), ::testing::HasSubstr(words)); \
  } while (false)

/// `call` is done, or the test ends with its words.
#define ASSERT_DONE(call) ASSERT_EQ(call, ZIGGURAT_OK) << ziggurat_last_error()

inline ziggurat_memory memory_of(TypedArray& values) {
  ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
  its.dtype = values.dtype == DType::kFloat32   ? ZIGGURAT_FP32
              : values.dtype == DType::kFloat16 ? ZIGGURAT_FP16
                                                : ZIGGURAT_BF16;
  its.address = values.bytes.data();
  its.size_bytes = values.bytes.size();
  return its;
}

/// Less than a tile, and two tiles and a half: each parameter in a group of its own.
class Embedder : public ::testing::Test {
 protected:
  static constexpr std::size_t kParams = 2;
  static constexpr std::array<std::size_t, kParams> kCounts{105, 40'000};
  static constexpr const char* kOnHost = R"(, "placement": "optimizer=host")";

  void SetUp() override {
    ASSERT_EQ(ziggurat_runtime_create(R"({"threads": 1})", &runtime_), ZIGGURAT_OK);
    for (std::size_t p = 0; p < kParams; ++p) {
      groups_[p] = ZIGGURAT_INIT(ziggurat_group);
      groups_[p].learning_rate = p == 0 ? 0.01F : 0.02F;
      groups_[p].beta1 = 0.9F;
      groups_[p].beta2 = 0.99F;
      groups_[p].eps = 1e-8F;
      groups_[p].weight_decay = p == 0 ? 0.1F : 0.0F;
      params_[p] = ZIGGURAT_INIT(ziggurat_param);
      params_[p].name = p == 0 ? "first" : "second";
      params_[p].group = static_cast<std::uint32_t>(p);
      params_[p].shape = p == 0 ? kFirstShape.data() : kSecondShape.data();
      params_[p].dimensions = p == 0 ? 3 : 2;
      set_values(p, initial(p, DType::kFloat32));
    }
  }
  void TearDown() override {
    close();
    EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK) << ziggurat_last_error();
  }

  static TypedArray initial(std::size_t param, DType dtype) {
    TypedArray values(dtype, kCounts[param]);
    for (std::size_t i = 0; i < values.count(); ++i) {
      values.set(i, 0.01F * static_cast<float>(i % 105) - 0.3F * static_cast<float>(param));
    }
    return values;
  }
  /// Whole numbers from -5 to 5, which every type has.
  static TypedArray gradient_of(std::size_t param, std::uint64_t step,
                                DType dtype = DType::kFloat32) {
    TypedArray values(dtype, kCounts[param]);
    for (std::size_t i = 0; i < values.count(); ++i)
      values.set(i, static_cast<float>((i * 7 + step * 3 + param) % 11) - 5.0F);
    return values;
  }
  void set_values(std::size_t param, const TypedArray& values) {
    values_[param] = values;
    params_[param].values = memory_of(values_[param]);
  }

  std::string settings(const std::string& more = "") const {
    return R"({"store": ")" + directory_.path() + "/store\"" + more + "}";
  }
  ziggurat_status open(const std::string& text) {
    return ziggurat_engine_open(runtime_, params_.data(), params_.size(), text.c_str(), &engine_);
  }
  void close() {
    if (engine_ == 0) return;
    EXPECT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK) << ziggurat_last_error();
    engine_ = 0;
  }
  /// Closes it, forgets what the parameters are, and goes on from its store.
  void reopen(const std::string& text) {
    close();
    for (TypedArray& values : values_) std::ranges::fill(values.bytes, std::byte{0x55});
    ASSERT_EQ(open(text), ZIGGURAT_OK) << ziggurat_last_error();
  }

  /// The gradient stays where it is until the test ends.
  ziggurat_status lend(std::size_t param, const TypedArray& gradient, float scale = 1) {
    const ziggurat_memory memory = memory_of(lent_.emplace_back(gradient));
    return ziggurat_lend_gradient(engine_, param, &memory, scale);
  }
  ziggurat_status add(std::size_t param, TypedArray& gradient, float scale = 1) const {
    const ziggurat_memory memory = memory_of(gradient);
    return ziggurat_add_gradient(engine_, param, &memory, scale);
  }
  void lend_both(std::uint64_t step) {
    for (std::size_t p = 0; p < kParams; ++p)
      EXPECT_EQ(lend(p, gradient_of(p, step)), ZIGGURAT_OK) << ziggurat_last_error();
  }
  ziggurat_step_options options() const {
    ziggurat_step_options its = ZIGGURAT_INIT(ziggurat_step_options);
    its.groups = groups_.data();
    its.group_count = static_cast<std::uint32_t>(groups_.size());
    return its;
  }
  ziggurat_status step() { return step(options()); }
  ziggurat_status step(const ziggurat_step_options& its) {
    return ziggurat_step(engine_, &its, &result_);
  }
  /// The parameter, as it is once its update has ended.
  const TypedArray& updated(std::size_t param) {
    EXPECT_EQ(ziggurat_wait(engine_, param), ZIGGURAT_OK) << ziggurat_last_error();
    return values_[param];
  }
  ziggurat_state state() const {
    ziggurat_state its = ZIGGURAT_INIT(ziggurat_state);
    EXPECT_EQ(ziggurat_engine_state(engine_, &its), ZIGGURAT_OK) << ziggurat_last_error();
    return its;
  }
  std::uint64_t steps_of(std::size_t param) const {
    std::uint64_t steps = 0;
    EXPECT_EQ(ziggurat_param_steps(engine_, param, &steps), ZIGGURAT_OK) << ziggurat_last_error();
    return steps;
  }
  std::string blob() const {
    std::string resumed(state().blob_bytes, '\0');
    EXPECT_EQ(ziggurat_read_blob(engine_, resumed.data(), resumed.size()), ZIGGURAT_OK);
    return resumed;
  }

  /// What the kernels are told of a parameter's step `t`.
  OptimizerStep::Settings scalars(std::size_t param, std::uint64_t t, float grad_scale = 1) const {
    OptimizerStep::Settings its = with_group({}, groups_[param]);
    its.grad_scale = grad_scale;
    its.t = t;
    return its;
  }

  const ScratchDirectory directory_;
  ziggurat_runtime runtime_ = 0;
  ziggurat_engine engine_ = 0;
  std::array<TypedArray, kParams> values_;
  std::array<ziggurat_param, kParams> params_{};
  std::array<ziggurat_group, kParams> groups_{};
  std::deque<TypedArray> lent_;
  ziggurat_step_result result_ = ZIGGURAT_INIT(ziggurat_step_result);

 private:
  static constexpr std::array<std::int64_t, 3> kFirstShape{3, 5, 7};
  static constexpr std::array<std::int64_t, 2> kSecondShape{200, 200};
};

}  // namespace ziggurat::testing
