// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_prefetch_depth_test.cc: how many units are brought ahead, as a table.
#include "core/plan/prefetch_depth.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"
#include "core/sharding/strategy.h"

namespace ziggurat {
namespace plan_prefetch_depth_test {

TEST(PrefetchDepth, KeepsADriveBusyWithSmallUnits) {
  struct Row {
    PrefetchFacts facts;
    std::size_t ahead;
  };
  const Row table[] = {
      {{.units = 12, .all_bytes = 12 * 14 * kMiB}, 2},
      {{.units = 12, .all_bytes = 12 * 14 * kMiB, .outstanding_bytes = 64 * kMiB}, 2},
      {{.units = 12, .all_bytes = 12 * 14 * kMiB, .from_drive = true}, 2},
      {{.units = 12,
        .all_bytes = 12 * 14 * kMiB,
        .from_drive = true,
        .outstanding_bytes = 16 * kMiB},
       2},
      {{.units = 12,
        .all_bytes = 12 * 14 * kMiB,
        .from_drive = true,
        .outstanding_bytes = 64 * kMiB},
       5},
      {{.units = 100, .all_bytes = 100 * kMiB, .from_drive = true, .outstanding_bytes = 64 * kMiB},
       8},
      {{.units = 0, .all_bytes = 0, .from_drive = true, .outstanding_bytes = 64 * kMiB}, 2},
  };
  for (const Row& row : table)
    EXPECT_EQ(units_ahead(row.facts), row.ahead)
        << row.facts.units << " units, " << row.facts.outstanding_bytes << " bytes in flight";
}

// Ranks whose drives differ would gather in different orders, and wait for each other for ever.
TEST(PrefetchDepth, IsTheSameOnAllRanksThatGather) {
  ModelSpec model{.name = "m", .units = {}};
  for (int u = 0; u < 8; ++u)
    model.units.push_back({"unit", {{.name = "weight", .shape = {4 * 16'384}}}});
  const Placement placement = parse_placement("params=nvme,grads=host,optimizer=nvme");
  EXPECT_EQ(units_ahead(ChunkTable(model, 2), placement, 64 * kMiB), kUnitsAheadMost);
  for (const int stage : {1, 2, 3}) {
    const Sharding sharding = Sharding::of(resolve({.zero_stage = stage}, 2), 0);
    EXPECT_EQ(units_ahead(ChunkTable(model, 2, {}, sharding), placement, 64 * kMiB),
              kUnitsAheadLeast)
        << stage;
  }
}

}  // namespace plan_prefetch_depth_test
}  // namespace ziggurat
