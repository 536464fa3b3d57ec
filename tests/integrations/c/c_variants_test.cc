// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_variants_test.cc: what a group says beside rates and decay: dampening,
// flags; and callers that were compiled before there was any of it.
#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_variants_test {

using CVariants = Embedder;

/// ziggurat_group as a caller was compiled with that knows nothing of what came after the decay.
struct OlderGroup {
  std::uint32_t struct_size;
  float learning_rate, beta1, beta2, eps, weight_decay;
};

/// Two steps of SGD in numbers that fp32 holds exactly.
TypedArray two_steps(const ziggurat_group& group, TypedArray values, const TypedArray& first,
                     const TypedArray& second) {
  const float sign = (group.flags & ZIGGURAT_MAXIMIZE) != 0 ? -1.0F : 1.0F;
  const bool nesterov = (group.flags & ZIGGURAT_NESTEROV) != 0;
  for (std::size_t i = 0; i < values.count(); ++i) {
    float momentum = 0;
    for (const bool is_first : {true, false}) {
      const float g = sign * (is_first ? first : second).at(i);
      momentum = group.beta1 * momentum + (is_first ? 1 : 1 - group.dampening) * g;
      const float update = nesterov ? g + group.beta1 * momentum : momentum;
      values.set(i, values.at(i) - group.learning_rate * update);
    }
  }
  return values;
}

TEST_F(CVariants, DampeningAndFlagsAreTakenAndCallersThatHaveNeitherAreToo) {
  std::array<OlderGroup, kParams> older{};
  std::array<TypedArray, kParams> begun;
  for (std::size_t p = 0; p < kParams; ++p) {
    begun[p] = TypedArray(DType::kFloat32, kCounts[p]);
    for (std::size_t i = 0; i < kCounts[p]; ++i) begun[p].set(i, static_cast<float>(i % 64));
    groups_[p] = ZIGGURAT_INIT(ziggurat_group);
    groups_[p].learning_rate = 0.5F;
    groups_[p].beta1 = p == 0 ? 0.5F : 0.25F;
    older[p] = {sizeof(OlderGroup), 0.5F, groups_[p].beta1, 0, 0, 0};
  }
  for (const bool is_older : {true, false}) {
    if (!is_older) {
      groups_[0].dampening = 0.25F;
      groups_[0].flags = ZIGGURAT_MAXIMIZE;
      groups_[1].flags = ZIGGURAT_NESTEROV;
    }
    for (std::size_t p = 0; p < kParams; ++p) set_values(p, begun[p]);
    ASSERT_DONE(open(settings(R"(, "resume": "never", "optimizer": "sgd")")));
    ziggurat_step_options its = options();
    if (is_older) its.groups = reinterpret_cast<const ziggurat_group*>(older.data());
    for (const std::uint64_t t : {1U, 2U}) {
      lend_both(t);
      ASSERT_DONE(step(its));
    }
    for (std::size_t p = 0; p < kParams; ++p)
      EXPECT_EQ(updated(p), two_steps(groups_[p], begun[p], gradient_of(p, 1), gradient_of(p, 2)));
    close();
  }
}

TEST_F(CVariants, WhatAnOptimizerHasNotIsRefused) {
  ASSERT_DONE(open(settings()));
  const TypedArray before = values_[0];
  lend_both(1);
  groups_[1].flags = 4 | ZIGGURAT_MAXIMIZE;
  EXPECT_REFUSED(step(), "groups.flags is 0x6");
  groups_[1].flags = ZIGGURAT_NESTEROV;
  EXPECT_REFUSED(step(), "only sgd may have dampening and nesterov");
  groups_[1].flags = 0;
  groups_[1].dampening = std::numeric_limits<float>::quiet_NaN();
  EXPECT_REFUSED(step(), "no step can be made with the settings of 'second'");
  EXPECT_EQ(updated(0), before);
  close();
  EXPECT_REFUSED(open(settings(R"(, "resume": "never", "initial_accumulator": 0.5)")),
                 "only adagrad has one");
}

}  // namespace c_variants_test
}  // namespace ziggurat::testing
