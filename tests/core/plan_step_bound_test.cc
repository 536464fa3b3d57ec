// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_step_bound_test.cc: the bound of a step, case by case, and its laws over random
// steps.
#include <gtest/gtest.h>

#include <random>

#include "core/plan/step_bound.h"

namespace ziggurat {
namespace plan_step_bound_test {

constexpr std::uint64_t kGB = 1'000'000'000;

TEST(StepBound, WithNoBytesIsCompute) {
  const StepBound bound =
      step_bound({.forward_s = 1, .backward_s = 2, .other_s = 0.5}, {.nvme = 1e9});
  EXPECT_DOUBLE_EQ(bound.seconds, 3.5);
  EXPECT_EQ(bound.limit, StepLimit::kCompute);
}

TEST(StepBound, ASweepThatNeedNotWaitHidesInTheWholeStep) {
  const StepWork work{
      .forward_s = 1, .backward_s = 2, .sweep_nvme_bytes = 3 * kGB, .sweep_waits_for_norm = false};
  EXPECT_DOUBLE_EQ(step_bound(work, {.nvme = 1e9}).seconds, 3);
  EXPECT_EQ(step_bound(work, {.nvme = 1e9}).limit, StepLimit::kCompute);
  EXPECT_DOUBLE_EQ(step_bound(work, {.nvme = 0.5e9}).seconds, 6);
  EXPECT_EQ(step_bound(work, {.nvme = 0.5e9}).limit, StepLimit::kNvme);
}

// GPT-2 small at 512 bytes a step: 2.06 GB of records at 4.4 GB/s behind 0.21 s of forward and 0.63
// s of backward.
TEST(StepBound, AClippedSweepHidesInForwardAndInWhatLeasesHold) {
  StepWork work{.forward_s = 0.21, .backward_s = 0.63, .sweep_nvme_bytes = 2'064'936'960};
  const LinkSpeeds links{.nvme = 4.4e9};
  EXPECT_NEAR(step_bound(work, links).seconds, 0.63 + 2.064936960 / 4.4, 1e-9);
  EXPECT_EQ(step_bound(work, links).limit, StepLimit::kNvmeForward);

  work.leased_bytes =
      260'000'000;  // 130 MB read ahead of the norm, 130 MB written after forward's end
  EXPECT_NEAR(step_bound(work, links).seconds, 0.63 + (2.064936960 - 0.26) / 4.4, 1e-9);
  EXPECT_NEAR(step_bound(work, links).hidden_in_backward_s, 0.26 / 4.4, 1e-9);

  work.leased_bytes = 4 * kGB;  // everything: nothing is left to see
  EXPECT_DOUBLE_EQ(step_bound(work, links).seconds, 0.84);
  EXPECT_EQ(step_bound(work, links).limit, StepLimit::kCompute);
}

TEST(StepBound, BackwardsOwnBytesTakeTheDriveFirst) {
  const StepWork work{.forward_s = 1,
                      .backward_s = 1,
                      .sweep_nvme_bytes = kGB,
                      .forward_nvme_bytes = 0,
                      .backward_nvme_bytes = 3 * kGB,
                      .leased_bytes = kGB};
  const StepBound bound = step_bound(work, {.nvme = 1e9});
  EXPECT_DOUBLE_EQ(bound.hidden_in_backward_s, 0);
  EXPECT_DOUBLE_EQ(bound.seconds, 4);
  EXPECT_EQ(bound.limit, StepLimit::kNvmeBackward);
}

TEST(StepBound, ASlowCopyLinkLimits) {
  const StepWork work{.forward_s = 1,
                      .backward_s = 1,
                      .host_to_device_bytes = 5 * kGB,
                      .device_to_host_bytes = kGB};
  const StepBound bound = step_bound(work, {.host_to_device = 1e9, .device_to_host = 1e9});
  EXPECT_DOUBLE_EQ(bound.seconds, 5);
  EXPECT_EQ(bound.limit, StepLimit::kHostToDevice);
}

TEST(StepBound, IsNoLessThanAnyResourceAloneAndMonotone) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto amount = [&] { return random() % (4 * kGB); };
  std::uniform_real_distribution<double> time(0, 2);
  for (int round = 0; round < 2000; ++round) {
    StepWork work{.forward_s = time(random),
                  .backward_s = time(random),
                  .other_s = time(random),
                  .sweep_nvme_bytes = amount(),
                  .forward_nvme_bytes = amount(),
                  .backward_nvme_bytes = amount(),
                  .host_to_device_bytes = amount(),
                  .device_to_host_bytes = amount(),
                  .sweep_waits_for_norm = random() % 2 == 0,
                  .leased_bytes = amount()};
    const LinkSpeeds links{.nvme = 1e9, .host_to_device = 2e9, .device_to_host = 2e9};
    const StepBound bound = step_bound(work, links);
    EXPECT_GE(bound.seconds, bound.compute_s);
    EXPECT_GE(bound.seconds, bound.nvme_s);
    EXPECT_LE(bound.seconds, bound.compute_s + bound.nvme_s + 4.0);

    StepWork unclipped = work;
    unclipped.sweep_waits_for_norm = false;
    EXPECT_LE(step_bound(unclipped, links).seconds, bound.seconds);
    StepWork more_leases = work;
    more_leases.leased_bytes += kGB;
    EXPECT_LE(step_bound(more_leases, links).seconds, bound.seconds + 1e-12);
    EXPECT_LE(step_bound(work, {.nvme = 2e9, .host_to_device = 2e9, .device_to_host = 2e9}).seconds,
              bound.seconds + 1e-12);
  }
}

// The hidden part chosen is the best one: no other split of the sweep between the passes ends
// sooner.
TEST(StepBound, NoOtherSplitOfTheSweepEndsSooner) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> time(0, 2);
  for (int round = 0; round < 200; ++round) {
    const StepWork work{.forward_s = time(random),
                        .backward_s = time(random),
                        .sweep_nvme_bytes = random() % (4 * kGB),
                        .forward_nvme_bytes = random() % kGB,
                        .backward_nvme_bytes = random() % kGB,
                        .leased_bytes = random() % kGB};
    const double bound = step_bound(work, {.nvme = 1e9}).seconds;
    const double sweep = static_cast<double>(work.sweep_nvme_bytes) / 1e9;
    const double leased = std::min(sweep, static_cast<double>(work.leased_bytes) / 1e9);
    for (int i = 0; i <= 50; ++i) {
      const double hidden = leased * i / 50;
      const double split =
          std::max(work.backward_s, static_cast<double>(work.backward_nvme_bytes) / 1e9 + hidden) +
          std::max(work.forward_s,
                   static_cast<double>(work.forward_nvme_bytes) / 1e9 + sweep - hidden);
      EXPECT_LE(bound, split + 1e-9);
    }
  }
}

}  // namespace plan_step_bound_test
}  // namespace ziggurat
