// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_device_plan_test.cc: what a device budget must hold, and what more of it is for.
#include "core/plan/device_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/memory_exhausted.h"

namespace ziggurat {
namespace plan_device_plan_test {

using ::testing::HasSubstr;

/// Units of 4, 16, 16 and 16 tiles: accumulators of 256 KiB and 1 MiB, and a page each.
ChunkTable table(Sharding sharding = {}) {
  ModelSpec model{.name = "m", .units = {}};
  for (const std::int64_t tiles : {4, 16, 16, 16})
    model.units.push_back({"unit", {{.name = "weight", .shape = {tiles * 16'384}}}});
  return ChunkTable(model, 32, {}, sharding);
}
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kSmall = 256 * kKiB + kPage;
constexpr std::uint64_t kLarge = kMiB + kPage;
constexpr std::uint64_t kParams = 512 * kKiB + kPage;  // of a large unit

TEST(DevicePlan, TheLeastIsOneUnitOneAccumulatorAndThatOfASmallUnit) {
  const DevicePlan plan = plan_device(table(), Placement{}, {}, 0);
  EXPECT_EQ(plan.smallest_bytes, kLarge + kSmall + kParams);
  EXPECT_EQ(plan.accumulators, 1u);
  EXPECT_THROW(require_device_budget(plan, plan.smallest_bytes - 1), MemoryExhausted);
  require_device_budget(plan, plan.smallest_bytes);
}

TEST(DevicePlan, TheTrainersBytesAndWhatIsPlacedThereComeOnTop) {
  const std::uint64_t least = plan_device(table(), Placement{}, {}, 0).smallest_bytes;
  const DeviceRequest trainer{.trainer = {.device_bytes = 200 * kKiB}};
  EXPECT_EQ(plan_device(table(), Placement{}, trainer, 0).smallest_bytes, least + 200 * kKiB);
  Placement grads;
  grads.grads = Tier::kDevice;
  EXPECT_EQ(plan_device(table(), grads, {}, 0).smallest_bytes, least + 3 * kParams + 128 * kKiB);
  // Parameters that are at home there are not brought there.
  Placement params;
  params.params = Tier::kDevice;
  EXPECT_EQ(plan_device(table(), params, {}, 0).smallest_bytes, least + 2 * kParams + 128 * kKiB);
}

TEST(DevicePlan, AHeldUnitIsThereBesideTheOneInUse) {
  const std::uint64_t least = plan_device(table(), Placement{}, {}, 0).smallest_bytes;
  const DevicePlan small = plan_device(table(), Placement{}, {.trainer = {.held = {0}}}, 0);
  EXPECT_EQ(small.in_use_bytes, kParams + 128 * kKiB);
  EXPECT_EQ(small.smallest_bytes, least + 128 * kKiB + small.slack_bytes);
  // It has the one that is set aside: the others bring their own.
  const DevicePlan large = plan_device(table(), Placement{}, {.trainer = {.held = {1}}}, 0);
  EXPECT_EQ(large.other_accumulator_bytes, kLarge);
  EXPECT_THROW(plan_device(table(), Placement{}, {.trainer = {.held = {4}}}, 0), Error);
}

TEST(DevicePlan, ASecondAccumulatorComesOnlyBesideEverythingElse) {
  Placement grads;
  grads.grads = Tier::kDevice;
  const DevicePlan least = plan_device(table(), grads, {}, 0);
  const std::uint64_t with_two = least.smallest_bytes + kLarge + kParams + kMiB;
  EXPECT_EQ(plan_device(table(), grads, {}, with_two - 1).accumulators, 1u);
  EXPECT_EQ(plan_device(table(), grads, {}, with_two).accumulators, 2u);
}

TEST(DevicePlan, WhatIsLeftIsForParametersAtMostForAllOfThem) {
  const std::uint64_t least = plan_device(table(), Placement{}, {}, 0).smallest_bytes;
  const auto live = [&](std::uint64_t budget) {
    return plan_device(table(), Placement{}, {}, budget).live_bytes;
  };
  EXPECT_EQ(live(least), kParams);
  EXPECT_EQ(live(100 * kMiB), 3 * kParams + 128 * kKiB);
  EXPECT_LE(plan_device(table(), Placement{}, {}, least + kMiB).peak_bytes(), least + kMiB);
}

TEST(DevicePlan, Stage3GathersIntoOneRegionThatLeavesRoomForWhatComesLater) {
  const ChunkTable half = table({.stage = 3, .rank = 0, .world_size = 2});
  const DevicePlan least = plan_device(half, Placement{}, {}, 0);
  EXPECT_EQ(least.in_use_bytes, 512 * kKiB + kPage);  // a buffer has an odd number of pages
  const DevicePlan plan = plan_device(half, Placement{}, {}, least.smallest_bytes + 600 * kKiB);
  EXPECT_EQ(plan.live_bytes, 1112 * kKiB + kPage);
  EXPECT_EQ(plan.peak_bytes() + plan.slack_bytes, least.smallest_bytes + 600 * kKiB);
  const DeviceRequest kept{.keep_gathered = true};
  EXPECT_EQ(plan_device(half, Placement{}, kept, 0).in_use_bytes,
            3 * 512 * kKiB + 128 * kKiB + kPage);
}

}  // namespace plan_device_plan_test
}  // namespace ziggurat
