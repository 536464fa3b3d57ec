// SPDX-License-Identifier: Apache-2.0
// tests/core/host_plan_test.cc: what the engine sets aside on the host is what the planner said.
#include "core/engine/host_plan.h"

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "core/sharding/memory.h"

namespace ziggurat {
namespace {

ModelSpec model_of(std::initializer_list<std::int64_t> units) {
  ModelSpec model{.name = "m", .units = {}};
  for (const std::int64_t count : units)
    model.units.push_back({"unit", {{.name = "weight", .shape = {count}}}});
  return model;
}

/// 12 work items beside everything that stays, as plan_host counts them.
std::uint64_t set_aside(const HostPlan& plan) {
  std::uint64_t total = plan.permanent_bytes + plan.gradient_bytes;
  for (const auto& reserve : plan.reserves) total += reserve.largest_item_bytes;
  return total + (kWorkItemsWanted - 1) * plan.item_bytes;
}

TEST(HostPlan, IsWhatThePlannerSaysForEveryPlacementAndFormat) {
  const ModelSpec model = model_of({900'000, 2'359'296, 2'359'296, 70'000});
  for (const char* text :
       {"all=host", "all=nvme", "params=host,grads=host,optimizer=nvme",
        "params=device,grads=host,optimizer=host", "params=nvme,grads=device,optimizer=nvme"}) {
    for (const StateFormat format : {StateFormat::kFp32, StateFormat::k8Bit, StateFormat::kBf16}) {
      const StateKind state{.format = format};
      const Placement placement = parse_placement(text);
      const ChunkTable table(model, kChunkTilesMax, state);
      const HostPlan plan = plan_host(table, placement, 64 * kMiB);
      const RankMemory memory = rank_memory({.model = model_size(model, 1),
                                             .recipe = {.state = state},
                                             .strategy = resolve({}, 1),
                                             .placement = placement});
      const auto said = static_cast<double>(memory.bytes(Tier::kHost));
      EXPECT_NEAR(static_cast<double>(set_aside(plan)) / said, 1, 0.005)
          << text << ", " << to_string(format);
    }
  }
}

}  // namespace
}  // namespace ziggurat
