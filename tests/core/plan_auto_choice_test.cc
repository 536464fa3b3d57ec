// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_auto_choice_test.cc: what `auto` takes for given facts, as a table: which tiers,
// how much memory for units and for records; and that both front ends get the same answer.
#include "core/plan/auto_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "core/plan/auto_ways.h"

namespace ziggurat {
namespace plan_auto_choice_test {

using ::testing::HasSubstr;

constexpr std::int64_t kUnits = 16;
constexpr std::int64_t kCount = std::int64_t{4} << 20;    // elements of a unit: 8 MiB in bf16
constexpr std::uint64_t kParams = kUnits * kCount * 2;    // 128 MiB
constexpr std::uint64_t kRecords = kUnits * kCount * 12;  // 768 MiB

ModelSpec model_of_units() {
  ModelSpec model{.name = "m", .units = {}};
  for (std::int64_t u = 0; u < kUnits; ++u) {
    const std::string name = "u" + std::to_string(u);
    model.units.push_back({.name = name, .params = {{.name = name, .shape = {kCount}}}});
  }
  return model;
}
RunRequest run() { return {.model = model_of_units(), .placement = {.automatic = true}}; }
/// The same model, of a trainer that lends its gradients; the state is durable at each step, as
/// that of `run()` is.
UnitsRequest units() {
  UnitsRequest request{.model = model_of_units(),
                       .units_least_bytes = 2 * kCount * 2,
                       .units_all_bytes = kParams,
                       .brought_bytes = kParams,
                       .gradient_bytes = kParams,
                       .has_store = true,
                       .optimizer = Tier::kNvme};
  for (std::uint32_t u = 0; u < kUnits; ++u) request.model.units[u].params[0].streamed = u;
  return request;
}
AutoRoom room_of(std::uint64_t free_bytes) { return {.free_bytes = free_bytes}; }

std::string tiers(const Placement& placement) {
  return std::string(to_string(placement.params)) + " " + std::string(to_string(placement.grads)) +
         " " + std::string(to_string(placement.optimizer));
}

struct Row {
  std::uint64_t free_mib;
  const char* tiers;
};

TEST(AutoChoice, TakesTheHighestTiersThatFitAndBothFrontEndsTakeTheSame) {
  const Row table[] = {
      {8192, "device host nvme"}, {1024, "device host nvme"}, {512, "device host nvme"},
      {320, "device host nvme"},  {224, "device nvme nvme"},  {128, "nvme nvme nvme"},
  };
  for (const Row& row : table) {
    const AutoRoom room = room_of(row.free_mib * kMiB);
    const RunChoice of_run = choose_run(run(), room, {});
    const UnitsChoice of_units = choose_units(units(), room, {});
    EXPECT_EQ(tiers(of_run.choice.placement), row.tiers) << row.free_mib << " MiB";
    EXPECT_EQ(tiers(of_units.choice.placement), row.tiers) << row.free_mib << " MiB";
  }
}

TEST(AutoChoice, NeverTakesMoreThanThereIs) {
  double moving_before = std::numeric_limits<double>::max();
  for (std::uint64_t free_mib = 96; free_mib <= 1536; free_mib += 32) {
    const AutoRoom room = room_of(free_mib * kMiB);
    const RunChoice of_run = choose_run(run(), room, {});
    const Budgets& budgets = of_run.plan.budgets;
    EXPECT_LE(budgets.device_bytes + budgets.host_bytes, free_mib * kMiB);
    EXPECT_LE(of_run.plan.device.peak_bytes(), budgets.device_bytes);
    EXPECT_LE(of_run.plan.host_peak_bytes(), budgets.host_bytes);
    const AutoChoice of_units = choose_units(units(), room, {}).choice;
    EXPECT_LE(of_units.memory_bytes, free_mib * kMiB);
    EXPECT_LE(of_units.moving_s, moving_before) << "more memory, and a step moves for longer";
    moving_before = of_units.moving_s;
  }
}

TEST(AutoChoice, GivesTheRestToRecordsUntilNoStepReadsOne) {
  const RunChoice much = choose_run(run(), room_of(8 * kGiB), {});
  EXPECT_EQ(much.plan.host.kept_item_bytes.size(), much.plan.chunk_count);
  EXPECT_LT(much.choice.memory_bytes, 2 * kGiB) << "what it has no use for is left";
  EXPECT_EQ(much.choice.drive_bytes, kRecords) << "each step writes them";
  const RunChoice some = choose_run(run(), room_of(kGiB), {});
  EXPECT_GT(some.plan.host.kept_item_bytes.size(), 0U);
  EXPECT_LT(some.plan.host.kept_item_bytes.size(), some.plan.chunk_count);
}

TEST(AutoChoice, LeavesWhatIsGivenByHand) {
  RunRequest request = run();
  request.budgets.host_bytes = 200 * kMiB;
  EXPECT_EQ(choose_run(request, room_of(kGiB), {}).plan.budgets.host_bytes, 200 * kMiB);
  request.placement = {.params = Tier::kHost, .grads = Tier::kNvme};
  EXPECT_EQ(tiers(choose_run(request, room_of(8 * kGiB), {}).choice.placement), "host nvme nvme");

  UnitsRequest by_hand = units();
  by_hand.params = Tier::kNvme;
  by_hand.grads = Tier::kHost;
  EXPECT_EQ(tiers(choose_units(by_hand, room_of(8 * kGiB), {}).choice.placement), "nvme host nvme");
  AutoRoom room = room_of(8 * kGiB);
  room.units_bytes = 64 * kMiB;  // not all units
  room.host_bytes = 300 * kMiB;
  const AutoChoice choice = choose_units(units(), room, {}).choice;
  EXPECT_EQ(tiers(choice.placement), "host host nvme");
  EXPECT_EQ(choice.units_bytes, 64 * kMiB);
  EXPECT_EQ(choice.host_bytes, 300 * kMiB);
}

TEST(AutoChoice, KeepsTheStateInMemoryWhereStepsNeedNotBeDurable) {
  UnitsRequest request = units();
  request.optimizer.reset();
  EXPECT_EQ(tiers(choose_units(request, room_of(2 * kGiB), {}).choice.placement),
            "device host host");
  EXPECT_EQ(tiers(choose_units(request, room_of(kGiB), {}).choice.placement), "device host nvme");
  request.has_store = false;
  EXPECT_EQ(tiers(choose_units(request, room_of(2 * kGiB), {}).choice.placement),
            "device host host");
  EXPECT_THROW(choose_units(request, room_of(kGiB), {}), Error);
  request.needs_store = true;
  EXPECT_THROW(choose_units(request, room_of(2 * kGiB), {}), Error);
}

TEST(AutoChoice, CountsWhatAllRanksOfTheMachineTakeAndWhatLiesBeside) {
  AutoRoom room = room_of(2 * kGiB);
  room.node_ranks = 4;
  EXPECT_EQ(tiers(choose_units(units(), room, {}).choice.placement), "device host nvme");
  room.node_ranks = 8;
  EXPECT_NE(tiers(choose_units(units(), room, {}).choice.placement), "device host nvme");
  UnitsRequest beside = units();
  beside.beside_bytes = 1800 * kMiB;
  EXPECT_NE(tiers(choose_units(beside, room_of(2 * kGiB), {}).choice.placement),
            "device host nvme");
}

/// Two ways between which only the speeds decide: one reads more, the other copies more.
std::vector<AutoWay> two_ways() {
  return {{.placement = {.params = Tier::kHost}, .drive_bytes = kGiB, .copied_bytes = 0},
          {.placement = {.params = Tier::kDevice}, .drive_bytes = 0, .copied_bytes = 4 * kGiB}};
}

TEST(AutoChoice, GoesByTheSpeedsOfTheMachine) {
  const std::vector<AutoWay> ways = two_ways();
  const MovingSpeeds slow_drive{.drive_bytes_per_s = 1e8, .copy_bytes_per_s = 8e9};
  const MovingSpeeds slow_copies{.drive_bytes_per_s = 8e9, .copy_bytes_per_s = 8e9};
  EXPECT_EQ(choose_auto(ways, {}, slow_drive)->placement.params, Tier::kDevice);
  EXPECT_EQ(choose_auto(ways, {}, slow_copies)->placement.params, Tier::kHost);
}

TEST(AutoChoice, TakesTheSpeedsFromTheProfile) {
  MachineProfile profile;
  EXPECT_FALSE(MovingSpeeds::of(profile, 0).drive_measured);
  profile.compute.emplace().copy_gb_per_s = 11;
  const MovingSpeeds speeds = MovingSpeeds::of(profile, 3e9);
  EXPECT_TRUE(speeds.drive_measured);
  EXPECT_EQ(speeds.drive_bytes_per_s, 3e9);
  EXPECT_EQ(speeds.copy_bytes_per_s, 11e9);
}

TEST(AutoChoice, GivesMemoryFirstToWhatSavesMost) {
  AutoWay way{.units = {.least_bytes = 1, .most_bytes = 101, .drive_saved_bytes = 100},
              .host = {.least_bytes = 1, .most_bytes = 101, .drive_saved_bytes = 200},
              .drive_bytes = 300};
  const AutoRoom room = room_of(102);
  const auto by_records = choose_auto(std::vector{way}, room, {});
  EXPECT_EQ(by_records->host_bytes, 101U);
  EXPECT_EQ(by_records->units_bytes, 1U);
  EXPECT_EQ(by_records->drive_bytes, 100U);
  way.host.drive_saved_bytes = 100;  // equal: a unit that is not there is waited for
  const auto by_units = choose_auto(std::vector{way}, room, {});
  EXPECT_EQ(by_units->units_bytes, 101U);
  EXPECT_EQ(by_units->host_bytes, 1U);
}

TEST(AutoChoice, TakesWholeGrainsButWhatIsGivenByHandAsItIs) {
  AutoWay way{.units = {.least_bytes = 1001, .most_bytes = 5001, .drive_saved_bytes = 100},
              .host = {.least_bytes = 501},
              .drive_bytes = 300};
  AutoRoom room = room_of(4999);
  room.grain_bytes = 100;
  const auto of_itself = choose_auto(std::vector{way}, room, {});
  EXPECT_EQ(of_itself->units_bytes, 4300U);
  EXPECT_EQ(of_itself->host_bytes, 600U);
  room.units_bytes = 1001;
  room.host_bytes = 502;
  const auto by_hand = choose_auto(std::vector{way}, room, {});
  ASSERT_TRUE(by_hand) << "what works is refused, since it is less than whole grains";
  EXPECT_EQ(by_hand->units_bytes, 1001U);
  EXPECT_EQ(by_hand->host_bytes, 502U);
  EXPECT_EQ(least_bytes(std::vector{way}, room), 1503U);
}

TEST(AutoChoice, CountsWhatIsUsedWhereItIsKeptOnTheDriveIfParametersAreThere) {
  UnitsRequest request = units();
  request.in_place_bytes = 512 * kMiB;
  request.in_place_moved_bytes = kGiB;
  request.in_place_gradient_bytes = 96 * kMiB;
  request.params = request.grads = Tier::kHost;
  EXPECT_THROW(choose_units(request, room_of(512 * kMiB), {}), Error);
  EXPECT_GE(choose_units(request, room_of(kGiB), {}).choice.memory_bytes, 640 * kMiB);
  request.params = Tier::kNvme;
  const AutoChoice there = choose_units(request, room_of(512 * kMiB), {}).choice;
  request.in_place_bytes = request.in_place_moved_bytes = request.in_place_gradient_bytes = 0;
  const AutoChoice without = choose_units(request, room_of(608 * kMiB), {}).choice;
  EXPECT_EQ(there.memory_bytes, without.memory_bytes - 96 * kMiB);
  EXPECT_EQ(there.drive_bytes, without.drive_bytes + kGiB + 2 * 96 * kMiB);
}

TEST(AutoChoice, SaysWhatItTakesAndWhy) {
  const RunChoice its = choose_run(run(), {.free_bytes = 8 * kGiB, .share = 0.9}, {});
  EXPECT_THAT(its.why,
              HasSubstr("auto: params=device,grads=host,optimizer=nvme, `device_memory` "));
  EXPECT_THAT(its.why, HasSubstr("(90 % of the 8.00 GiB that are free)"));
  EXPECT_THAT(its.why, HasSubstr("a step moves 768.0 MiB over the drive, 0.40 s at 2.0 GB/s, which "
                                 "was not measured"));
}

TEST(AutoChoice, RefusesWhatDoesNotFitAndSaysTheLeast) {
  try {
    choose_run(run(), room_of(8 * kMiB), {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), HasSubstr("the least that works is "));
    EXPECT_THAT(error.what(), HasSubstr("the run may take 8.0 MiB"));
  }
  AutoRoom by_hand = room_of(8 * kGiB);
  by_hand.host_bytes = 4 * kKiB;
  try {
    choose_run(run(), by_hand, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("4.0 KiB of host memory, as given, are too small: the "
                                        "least that works is "));
  }
}

}  // namespace plan_auto_choice_test
}  // namespace ziggurat
