// SPDX-License-Identifier: Apache-2.0
// tests/core/host_plan_test.cc: what the engine sets aside on the host is what the planner said.
#include "core/engine/host_plan.h"

#include <gtest/gtest.h>

#include <vector>

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

/// Ranks, and how they share a state.
struct World {
  int ranks;
  StrategyRequest request;
  Quantization quantization{};

  Sharding sharding() const {
    const Strategy strategy = resolve(request, ranks);
    Sharding sharding = Sharding::of(strategy.zero_stage, 0, ranks, request.shard_group);
    sharding.node_ranks = strategy.hpz;
    sharding.quantization = quantization;
    return sharding;
  }
};

std::vector<World> worlds() {
  std::vector<World> all;
  for (const int ranks : {1, 2, 3, 8}) {
    for (int stage = 0; stage <= 3; ++stage) all.push_back({ranks, {.zero_stage = stage}});
  }
  all.push_back({8, {.hpz = 2}});
  for (const int stage : {1, 2, 3})
    all.push_back({8, {.zero_stage = stage, .name = StrategyName::kHybrid, .shard_group = 4}});
  all.push_back({8, {.name = StrategyName::kHybrid, .shard_group = 4, .hpz = 2}});
  all.push_back({3, {}, {.weights = true}});
  all.push_back({8, {}, {.gradient_bits = 8}});
  all.push_back({8, {.hpz = 4}, {.weights = true, .gradient_bits = 4}});
  return all;
}

// As of a whole model, of a part; where rounding up divides nothing, as the engine has it.
TEST(HostPlan, IsWhatThePlannerSaysOfAPartOfEveryLayer) {
  const ModelSpec model{"m",
                        {{"embedding",
                          {{.name = "symbols", .shape = {256, 768}, .tp_dim = 0},
                           {.name = "positions", .shape = {1024, 768}}}},
                         {"block",
                          {{.name = "qkv", .shape = {768, 2304}, .tp_dim = 1, .tp_sections = 3},
                           {.name = "projection", .shape = {768, 768}, .tp_dim = 0},
                           {.name = "norms", .shape = {6 * 768}}}}}};
  for (const int parts : {1, 2, 4}) {
    for (const World& world : worlds()) {
      Sharding sharding = world.sharding();
      sharding.tensor = {.rank = parts - 1, .ranks = parts};
      const Strategy strategy = resolve(world.request, world.ranks);
      const ChunkTable table(part_of(model, parts), kChunkTilesMax, {}, sharding);
      const ReductionSettings reduction{.dtype = DType::kBFloat16,
                                        .bucket_elements = kReduceBucketCount};
      const HostPlan plan = plan_host(table, Placement{}, reduction, 64 * kMiB);
      const RankMemory memory = rank_memory({.model = model_size(model, parts),
                                             .recipe = {},
                                             .strategy = strategy,
                                             .quantization = world.quantization,
                                             .placement = Placement{}});
      EXPECT_NEAR(
          static_cast<double>(set_aside(plan)) / static_cast<double>(memory.bytes(Tier::kHost)), 1,
          0.01)
          << to_string(strategy) << " of " << world.ranks << " x " << parts;
      EXPECT_EQ(memory.bytes(StateClass::kMasters) + memory.bytes(StateClass::kMoments),
                table.total_record_bytes());
      EXPECT_EQ(memory.bytes(StateClass::kAccumulator), table.largest_unit_padded_count() * 4);
    }
  }
}

TEST(HostPlan, IsWhatThePlannerSaysOfEveryStrategyPlacementAndFormat) {
  const ModelSpec model = model_of({900'000, 2'359'296, 2'359'296, 70'000});
  const ReductionSettings reduction{.dtype = DType::kBFloat16,
                                    .bucket_elements = kReduceBucketCount};
  for (const char* text :
       {"all=host", "all=nvme", "params=host,grads=host,optimizer=nvme",
        "params=device,grads=host,optimizer=host", "params=nvme,grads=device,optimizer=nvme"}) {
    const Placement placement = parse_placement(text);
    for (const StateFormat format : {StateFormat::kFp32, StateFormat::k8Bit, StateFormat::kBf16}) {
      for (const World& world : worlds()) {
        const StateKind state{.format = format};
        const Strategy strategy = resolve(world.request, world.ranks);
        const ChunkTable table(model, kChunkTilesMax, state, world.sharding());
        const HostPlan plan = plan_host(table, placement, reduction, 64 * kMiB);
        const RankMemory memory = rank_memory({.model = model_size(model, 1),
                                               .recipe = {.state = state},
                                               .strategy = strategy,
                                               .quantization = world.quantization,
                                               .placement = placement});
        const auto said = static_cast<double>(memory.bytes(Tier::kHost));
        EXPECT_NEAR(static_cast<double>(set_aside(plan)) / said, 1, 0.01)
            << text << ", " << to_string(format) << ", " << to_string(strategy) << " of "
            << world.ranks;
      }
    }
  }
}

}  // namespace
}  // namespace ziggurat
