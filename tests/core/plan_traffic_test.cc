// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_traffic_test.cc: bytes sent in a step against the papers' multiples of Psi,
// and against messages counted one by one.
#include "core/plan/traffic.h"

#include <gmock/gmock.h>

#include "base/error.h"
#include "core/sharding/shard.h"

namespace ziggurat {
namespace plan_traffic_test {

constexpr std::uint64_t kElements = 1 << 30;  // divides by every number of ranks here
constexpr double kPsi = 2.0 * kElements;      // bytes

TrafficRequest request(const StrategyRequest& strategy, int dp, int per_node) {
  return {.model = model_size(kElements, 1),
          .recipe = {},
          .strategy = resolve(strategy, dp),
          .dp_ranks_per_node = per_node};
}

double in_psi(std::uint64_t bytes) { return static_cast<double>(bytes) / kPsi; }
double sent(const TrafficRequest& one) { return in_psi(step_traffic(one).sent().total()); }

// Rajbhandari et al. 2020, "ZeRO", section 7: 2 Psi for stages 0 to 2, 3 Psi for stage 3; with the
// (N-1)/N that a rank does not send to itself.
TEST(ShardingTraffic, StagesSendTwoAndThreePsi) {
  for (const int dp : {2, 4, 64}) {
    const double ring = (dp - 1.0) / dp;
    for (int stage = 0; stage <= 2; ++stage)
      EXPECT_DOUBLE_EQ(sent(request({.zero_stage = stage}, dp, dp)), 2 * ring) << stage;
    EXPECT_DOUBLE_EQ(sent(request({.zero_stage = 3}, dp, dp)), 3 * ring);
    EXPECT_DOUBLE_EQ(sent(request({.name = StrategyName::kGradOp}, dp, dp)), 2 * ring);
  }
  EXPECT_EQ(step_traffic(request({}, 1, 1)).sent().total(), 0u);
}

// Micro-batch by micro-batch parameters are gathered anew for each; unit by unit once.
TEST(ShardingTraffic, AccumulationRepeatsGathersButNotGradients) {
  for (const int passes : {1, 4, 16}) {
    TrafficRequest one = request({.zero_stage = 3}, 8, 8);
    one.passes = passes;
    EXPECT_DOUBLE_EQ(sent(one), (2 * passes + 1) * 7 / 8.0);
    one.strategy = resolve({.zero_stage = 2}, 8);
    EXPECT_DOUBLE_EQ(sent(one), 2 * 7 / 8.0);
  }
}

// What each sends to every other, near and far.
TEST(ShardingTraffic, OfDividedLayersIsWhatTheTrainerSays) {
  TrafficRequest one = request({.zero_stage = 3}, 2, 1);
  one.model = model_size(kElements, 4);
  one.tensor = {.forward = 300, .again = 150, .backward = 303, .shared_gradients = 6};
  one.tensor_ranks_per_node = 2;
  const StepTraffic traffic = step_traffic(one);
  EXPECT_EQ(traffic.sent(Exchange::kTensorForward).same_node, 100u);
  EXPECT_EQ(traffic.sent(Exchange::kTensorForward).other_nodes, 200u);
  EXPECT_EQ(traffic.sent(Exchange::kTensorAgain).total(), 150u);
  EXPECT_EQ(traffic.sent(Exchange::kTensorBackward).total(), 303u);
  EXPECT_EQ(traffic.sent(Exchange::kTensorShared).total(), 6u);
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kGradients).total()), 0.5 / 4);
}

TEST(ShardingTraffic, EachTypeCountsItsOwnBytes) {
  TrafficRequest one = request({.zero_stage = 2}, 4, 4);
  one.recipe.reduce_dtype = DType::kFloat32;
  const StepTraffic traffic = step_traffic(one);
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kGradients).total()), 2 * 0.75);
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kUpdateGather).total()), 0.75);
}

// Every slice to every other rank, counted one by one, padding included.
TEST(ShardingTraffic, IsTheSumOfItsMessages) {
  const std::uint64_t units[] = {100'000, 5'000'000, 20'000};
  for (const int dp : {2, 3, 7}) {
    TrafficRequest one = request({.zero_stage = 3}, dp, 2);
    one.model.units.assign(std::begin(units), std::end(units));
    std::uint64_t same_node = 0;
    std::uint64_t other_nodes = 0;
    for (const std::uint64_t unit : units) {
      for (int peer = 1; peer < dp; ++peer)
        (peer < 2 ? same_node : other_nodes) += 3 * 2 * slice_elements(unit, dp);
    }
    const SentBytes all = step_traffic(one).sent();
    EXPECT_EQ(all.same_node, same_node);
    EXPECT_EQ(all.other_nodes, other_nodes);
  }
}

TEST(ShardingTraffic, AHybridKeepsGathersInItsGroupAndReducesShardsAcross) {
  const StepTraffic traffic =
      step_traffic(request({.name = StrategyName::kHybrid, .shard_group = 8}, 32, 8));
  EXPECT_EQ(traffic.sent(Exchange::kForwardGather).other_nodes, 0u);
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kForwardGather).same_node), 7 / 8.0);
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kGradients).same_node), 7 / 8.0);
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kReplicas).other_nodes), 2 * (3 / 4.0) / 8);
  EXPECT_EQ(traffic.sent(Exchange::kReplicas).same_node, 0u);
}

// Wang et al. 2023, "ZeRO++", table 1: between nodes 3 M become 0.5 M (qwZ) + 0 (hpZ) + 0.25 M
// (qgZ), M being what a node receives of the model in 16 bits; scales are beside it.
TEST(ShardingTraffic, ZeroPlusPlusSendsThreeQuartersOfPsiBetweenNodes) {
  constexpr int kPerNode = 8;
  constexpr int kNodes = 4;
  TrafficRequest one = request({.hpz = kPerNode}, kPerNode * kNodes, kPerNode);
  one.quantization = {.weights = true, .gradient_bits = 4};
  const StepTraffic traffic = step_traffic(one);
  const auto node = [&](Exchange exchange) {
    return kPerNode * in_psi(traffic.sent(exchange).other_nodes) / ((kNodes - 1.0) / kNodes);
  };
  const double scales = 4.0 / 256 / 2;  // of an element of 2 bytes
  EXPECT_NEAR(node(Exchange::kForwardGather), 0.5 + scales, 1e-9);
  EXPECT_EQ(node(Exchange::kBackwardGather), 0);
  EXPECT_NEAR(node(Exchange::kGradients), 0.25 + scales, 1e-9);
  // hpZ's gather is of 16 bits, within the node.
  EXPECT_DOUBLE_EQ(in_psi(traffic.sent(Exchange::kBackwardGather).same_node), 7 / 8.0);
}

TEST(ShardingTraffic, GoingByNodeSendsAsMuchInAllAndLessBetweenNodes) {
  TrafficRequest direct = request({}, 32, 8);
  TrafficRequest grouped = direct;
  grouped.quantization.gradient_bits = 8;
  const SentBytes sixteen = step_traffic(direct).sent(Exchange::kGradients);
  const SentBytes eight = step_traffic(grouped).sent(Exchange::kGradients);
  const double byte_ratio = (1 + 4.0 / 256) / 2;
  EXPECT_NEAR(static_cast<double>(eight.total()) / static_cast<double>(sixteen.total()), byte_ratio,
              1e-9);
  EXPECT_NEAR(static_cast<double>(eight.other_nodes) / static_cast<double>(sixteen.other_nodes),
              byte_ratio / 8, 1e-9);
}

// The second cut lasts from the first pass of a step to its last.
TEST(ShardingTraffic, PassesAfterTheFirstGatherFromTheSecondCut) {
  TrafficRequest one = request({.hpz = 8}, 32, 8);
  const SentBytes once = step_traffic(one).sent();
  const SentBytes backward = step_traffic(one).sent(Exchange::kBackwardGather);
  one.passes = 3;
  const SentBytes thrice = step_traffic(one).sent();
  EXPECT_EQ(thrice.other_nodes, once.other_nodes);
  EXPECT_EQ(thrice.same_node, once.same_node + 4 * backward.same_node);
}

TEST(ShardingTraffic, WhatCannotBeQuantizedIsRefused) {
  const auto refusal = [](TrafficRequest one, Quantization quantization) -> std::string {
    one.quantization = quantization;
    try {
      step_traffic(one);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(
      refusal(request({.zero_stage = 2}, 8, 8), {.weights = true}),
      ::testing::HasSubstr("`quantized_weights` can be used only with `zero_stage=3` over all"));
  const StrategyRequest groups{.name = StrategyName::kHybrid, .shard_group = 4};
  EXPECT_THAT(
      refusal(request(groups, 8, 8), {.weights = true, .gradient_bits = 4}),
      ::testing::HasSubstr("`quantized_weights` and `quantized_gradients=4` can be used only with "
                           "`zero_stage=3` over all ranks; this run has stage 3 in groups of 4"));
  EXPECT_THAT(refusal(request({}, 1, 8), {.gradient_bits = 8}),
              ::testing::HasSubstr("`quantized_gradients=8` cannot be used with one rank"));
  EXPECT_THAT(refusal(request({}, 8, 8), {.gradient_bits = 5}),
              ::testing::HasSubstr("give 4 or 8"));
  EXPECT_THAT(refusal(request({}, 12, 8), {.gradient_bits = 8}),
              ::testing::HasSubstr("12 ranks do not fill nodes of 8"));
}

}  // namespace plan_traffic_test
}  // namespace ziggurat
