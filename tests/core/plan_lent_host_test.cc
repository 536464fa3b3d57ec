// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_lent_host_test.cc: the host memory of an engine that a trainer lends its memory,
// by hand-made sums. tests/integrations/python/plan_test.py compares it with engines that are open.
#include "core/plan/lent_host_plan.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

namespace ziggurat {
namespace plan_lent_host_test {

constexpr std::uint64_t kPage = 4096;  // by which the pool staggers what has 256 KiB and more
constexpr std::uint64_t kTileBytes32 = 16384 * 4;
constexpr std::uint64_t kRecord = 32 * 3 * kTileBytes32;  // of a chunk of 32 tiles: fp32 AdamW's
constexpr std::uint64_t kParams = 32 * kTileBytes32 / 2;  // of that chunk, in bf16

/// Two chunks of bf16 parameters, in memory of the trainer's or `streamed`.
LentHostRequest request_of(const Placement& placement, bool streamed, std::uint64_t budget_bytes) {
  LentHostRequest request{.model = {.name = "m", .units = {}},
                          .placement = placement,
                          .host_budget_bytes = budget_bytes};
  ParamSpec param{.name = "w", .shape = {2 * 32 * 16384}};
  if (streamed) param.streamed = 0;
  request.model.units.push_back({.name = "w", .params = {param}});
  return request;
}
Placement on_nvme(Tier params, Tier grads = Tier::kHost) {
  return {.params = params, .grads = grads, .optimizer = Tier::kNvme};
}

TEST(LentHostPlan, CountsRecordsThatPassThroughMemory) {
  const LentHostPlan plan = plan_lent_host(request_of(on_nvme(Tier::kHost), false, 0));
  EXPECT_EQ(plan.smallest_bytes, kRecord + kPage);
  EXPECT_EQ(plan.budget_bytes, 12 * (kRecord + kPage));
  EXPECT_EQ(plan.all_bytes, 14 * (kRecord + kPage));
  EXPECT_EQ(plan.records, 2U);
  EXPECT_EQ(plan.item_bytes, kRecord);
  EXPECT_EQ(plan.read_bytes, 0U) << "both stay beside the items that the other needs";
  EXPECT_EQ(plan.items, 10U);
}

TEST(LentHostPlan, ReadsWhatDoesNotStay) {
  const LentHostPlan plan =
      plan_lent_host(request_of(on_nvme(Tier::kHost), false, kRecord / 32 * 64));
  EXPECT_EQ(plan.records, 13U);  // of 5 tiles, of which 12 fit
  const LentHostPlan least = plan_lent_host(request_of(on_nvme(Tier::kHost), false, kRecord / 32));
  EXPECT_EQ(least.smallest_bytes, kRecord / 32);  // a tile, which is small
  EXPECT_EQ(least.records, 64U);
  EXPECT_EQ(least.items, 1U);
  EXPECT_EQ(least.read_bytes, 2 * kRecord);
}

TEST(LentHostPlan, SaysTheLeastWhereTheBudgetIsTooSmall) {
  const LentHostPlan plan =
      plan_lent_host(request_of(on_nvme(Tier::kHost), false, kRecord / 32 - 1));
  EXPECT_EQ(plan.smallest_bytes, kRecord / 32);
  EXPECT_EQ(plan.budget_bytes, kRecord / 32 - 1);
  EXPECT_EQ(plan.items + plan.item_bytes + plan.read_bytes, 0U);
}

TEST(LentHostPlan, HasParametersAndGradientsBesideARecordWhereTheyComeFromTheDrive) {
  const LentHostPlan plan = plan_lent_host(request_of(on_nvme(Tier::kNvme, Tier::kNvme), true, 0));
  EXPECT_EQ(plan.item_bytes, kRecord + kParams + 2 * kParams) << "the sum is in fp32";
  const std::uint64_t whole = 2 * kParams + kPage, sum = 2 * kParams + kPage;
  EXPECT_EQ(plan.budget_bytes, 12 * (plan.item_bytes + kPage) + whole + sum);
}

TEST(LentHostPlan, HasParametersBesideARecordWhereTheyLiveOnAGpu) {
  LentHostRequest request = request_of(on_nvme(Tier::kDevice), true, 0);
  EXPECT_EQ(plan_lent_host(request).item_bytes, kRecord) << "the CPU reaches them";
  request.reduction = {.staged = true, .whole_unit_bytes = kMiB};
  const LentHostPlan plan = plan_lent_host(request);
  EXPECT_EQ(plan.item_bytes, kRecord + kParams);
  EXPECT_EQ(plan.budget_bytes, 12 * (plan.item_bytes + kPage) + 2 * kMiB + kPage);
}

TEST(LentHostPlan, DoesNotReadTheParametersThatARecordHasToo) {
  const std::uint64_t budget_bytes = 8 * kMiB;  // chunks of few tiles, of which none stays
  for (const Tier params : {Tier::kHost, Tier::kNvme, Tier::kDevice}) {
    LentHostRequest request = request_of(on_nvme(params), true, budget_bytes);
    request.state.format = StateFormat::kSplit;  // parameters, residuals and moments
    request.placement.host_record_bytes = 0;
    request.reduction.staged = true;
    const std::uint64_t all_bytes = 2 * kRecord;
    const std::uint64_t read_bytes = plan_lent_host(request).read_bytes;
    EXPECT_EQ(read_bytes, params == Tier::kHost ? all_bytes - 2 * kParams : all_bytes);
  }
}

}  // namespace plan_lent_host_test
}  // namespace ziggurat
