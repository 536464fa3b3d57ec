// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_host_leases_test.cc: what leases take at their peak is what may be there at once,
// and never more than the budget leaves.
#include "core/plan/host_leases.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

namespace ziggurat {
namespace plan_host_leases_test {

/// Four units, of which each has two chunks of two tiles, and a small one before them.
ModelSpec model() {
  ModelSpec model{.name = "m", .units = {}};
  for (const std::int64_t tiles : {1, 4, 4, 4, 4})
    model.units.push_back({"unit", {{.name = "weight", .shape = {tiles * 16'384}}}});
  return model;
}
constexpr std::uint64_t kTile = 16'384 * sizeof(bf16);
constexpr std::uint64_t kUnit = 4 * kTile;
constexpr std::uint64_t kPlenty = 64 * kMiB;  // in which all records stay

struct Run {
  const char* placement;
  std::uint64_t budget_bytes = kPlenty;
  bool device_keeps_all = true;
  Sharding sharding{};
  std::size_t units_ahead = 2;
};

std::uint64_t leases(const Run& run) {
  const ChunkTable table(model(), 2, {}, run.sharding);
  const Placement placement = parse_placement(run.placement);
  const HostPlan host = plan_host(table, placement, {}, run.budget_bytes);
  const DevicePlan device{.accumulators = 2, .keeps_all = run.device_keeps_all};
  return lease_peak_bytes({.table = table,
                           .placement = placement,
                           .reduction = {},
                           .host = host,
                           .device = device,
                           .budget_bytes = run.budget_bytes,
                           .units_ahead = run.units_ahead});
}

Sharding two_ranks(int stage) { return Sharding::of(resolve({.zero_stage = stage}, 2), 0); }

TEST(HostLeases, AreWorkItemsAloneWhereNothingComesFromNvme) {
  EXPECT_EQ(leases({"params=host,grads=host,optimizer=host"}), 0u);
  EXPECT_EQ(leases({"params=host,grads=host,optimizer=nvme"}), 0u) << "all records are kept";
  const ChunkTable table(model(), 2);
  const std::uint64_t least = plan_host(table, Placement{}, {}, 0).smallest_bytes();
  EXPECT_EQ(leases({"params=host,grads=host,optimizer=nvme", least}),
            lease_bytes(table.largest_record_bytes()));
}

TEST(HostLeases, HaveTheUnitInUseAndTwoThatComeAheadOfIt) {
  EXPECT_EQ(leases({"params=nvme,grads=host,optimizer=nvme"}), 3 * kUnit);
  EXPECT_EQ(leases({"params=nvme,grads=host,optimizer=nvme", kPlenty, true, two_ranks(0)}),
            3 * kUnit);
}

TEST(HostLeases, HaveAsManyUnitsAheadAsKeepAMeasuredDriveBusy) {
  EXPECT_EQ(leases({.placement = "params=nvme,grads=host,optimizer=nvme", .units_ahead = 3}),
            4 * kUnit);
}

TEST(HostLeases, HaveAUnitMoreThatIsGatheredAndInStageThreeOnlyASlice) {
  const char* const placement = "params=nvme,grads=host,optimizer=nvme";
  EXPECT_EQ(leases({placement, kPlenty, true, two_ranks(2)}), 4 * kUnit);
  EXPECT_EQ(leases({placement, kPlenty, true, two_ranks(3)}), kUnit / 2);
}

TEST(HostLeases, HaveGradientsOfTwoLargeUnitsAndASmallOneInBackward) {
  EXPECT_EQ(leases({"params=host,grads=nvme,optimizer=nvme"}), 2 * kUnit + kTile);
}

TEST(HostLeases, AreNotOfBothPassesAtOnceUnlessBackwardBringsUnitsAgain) {
  EXPECT_EQ(leases({"all=nvme"}), 3 * kUnit);
  EXPECT_EQ(leases({"all=nvme", kPlenty, false}), 3 * kUnit + 2 * kUnit + kTile);
}

TEST(HostLeases, TakeNoMoreThanTheBudgetLeaves) {
  const ChunkTable table(model(), 2);
  const Placement placement = parse_placement("all=nvme");
  const std::uint64_t least = plan_host(table, placement, {}, 0).smallest_bytes();
  for (std::uint64_t more = 0; more < 4 * kMiB; more += 128 * kKiB) {
    const HostPlan host = plan_host(table, placement, {}, least + more);
    const std::uint64_t held = host.permanent_bytes + host.gradient_bytes + host.kept_bytes;
    EXPECT_LE(held + leases({"all=nvme", least + more, false}), least + more);
    EXPECT_LE(held + leases({"all=nvme", least + more}), least + more);
  }
  EXPECT_LT(leases({"all=nvme", least}), leases({"all=nvme", least + kMiB}));
}

}  // namespace plan_host_leases_test
}  // namespace ziggurat
