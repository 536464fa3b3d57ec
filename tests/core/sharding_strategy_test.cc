// SPDX-License-Identifier: Apache-2.0
// tests/core/sharding_strategy_test.cc: what each strategy cuts, and what contradicts itself.
#include "core/sharding/strategy.h"

#include <gmock/gmock.h>

#include <array>

#include "base/error.h"

namespace ziggurat {
namespace sharding_strategy_test {

using ::testing::HasSubstr;

/// Groups of parameters; groups of gradients and optimizer state.
std::array<int, 2> shards(const Strategy& strategy) {
  return {strategy.param_shards(), strategy.update_shards()};
}

std::string refusal(const StrategyRequest& request, int dp) {
  try {
    resolve(request, dp);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(Strategy, AStageCutsTheOptimizersStateAndThenParameters) {
  EXPECT_EQ(shards(resolve({.zero_stage = 0}, 8)), (std::array{1, 1}));
  EXPECT_EQ(shards(resolve({.zero_stage = 1}, 8)), (std::array{1, 8}));
  EXPECT_EQ(shards(resolve({.zero_stage = 2}, 8)), (std::array{1, 8}));
  EXPECT_EQ(shards(resolve({.zero_stage = 3}, 8)), (std::array{8, 8}));
  EXPECT_EQ(to_string(resolve({}, 8)), "stage 3");
}

TEST(Strategy, FsdpsNamesAreStages) {
  EXPECT_EQ(shards(resolve({.name = StrategyName::kFull}, 8)), (std::array{8, 8}));
  EXPECT_EQ(shards(resolve({.name = StrategyName::kNone}, 8)), (std::array{1, 1}));
  EXPECT_EQ(resolve({.zero_stage = 3, .name = StrategyName::kFull}, 8).zero_stage, 3);
}

TEST(Strategy, GradOpCutsParametersAtRestAndKeepsThemThroughBackward) {
  const Strategy strategy = resolve({.name = StrategyName::kGradOp}, 8);
  EXPECT_EQ(shards(strategy), (std::array{8, 8}));
  EXPECT_TRUE(strategy.keeps_params_to_backward);
  EXPECT_EQ(to_string(strategy), "stage 3 (grad-op)");
}

TEST(Strategy, AHybridCutsWithinItsGroupAndRepeatsAcross) {
  const Strategy strategy = resolve({.name = StrategyName::kHybrid, .shard_group = 4}, 12);
  EXPECT_EQ(shards(strategy), (std::array{4, 4}));
  EXPECT_EQ(strategy.replicas(), 3);
  EXPECT_EQ(to_string(strategy), "stage 3 in groups of 4");
  const Strategy second =
      resolve({.zero_stage = 2, .name = StrategyName::kHybrid, .shard_group = 4}, 12);
  EXPECT_EQ(shards(second), (std::array{1, 4}));
}

TEST(Strategy, HpzCutsOverTheWholeWorldAndOnceMore) {
  const Strategy strategy = resolve({.hpz = 4}, 12);
  EXPECT_EQ(shards(strategy), (std::array{12, 12}));
  EXPECT_FALSE(strategy.is_hybrid());
  EXPECT_EQ(to_string(strategy), "stage 3, hpz 4");
}

TEST(Strategy, AHybridsGroupMayHaveASecondCut) {
  const Strategy strategy = resolve({.name = StrategyName::kHybrid, .shard_group = 4, .hpz = 2}, 8);
  EXPECT_EQ(to_string(strategy), "stage 3 in groups of 4, hpz 2");
}

TEST(Strategy, WhatContradictsItselfIsRefusedByItsFlags) {
  EXPECT_THAT(refusal({.zero_stage = 3, .name = StrategyName::kNone}, 8),
              HasSubstr("`strategy=none` means `zero_stage=0`, not 3"));
  EXPECT_THAT(refusal({.zero_stage = 4}, 8), HasSubstr("give 0, 1, 2 or 3"));
  EXPECT_THAT(refusal({.shard_group = 4}, 8), HasSubstr("works only with `strategy=hybrid`"));
  EXPECT_THAT(refusal({.name = StrategyName::kHybrid}, 8), HasSubstr("needs `shard_group`"));
  EXPECT_THAT(refusal({.name = StrategyName::kHybrid, .shard_group = 3}, 8),
              HasSubstr("does not divide the 8 data-parallel ranks"));
  EXPECT_THAT(refusal({.zero_stage = 0, .name = StrategyName::kHybrid, .shard_group = 2}, 8),
              HasSubstr("stage 0 divides nothing"));
  EXPECT_THAT(refusal({.hpz = 3}, 8), HasSubstr("into several groups of 2 or more"));
  EXPECT_THAT(refusal({.zero_stage = 2, .hpz = 4}, 8),
              HasSubstr("only stage 3 divides; this run has stage 2"));
  EXPECT_THAT(refusal({.name = StrategyName::kHybrid, .shard_group = 4, .hpz = 8}, 8),
              HasSubstr("does not divide the 4 ranks that share a copy"));
}

}  // namespace sharding_strategy_test
}  // namespace ziggurat
