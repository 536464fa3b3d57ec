// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_host_plan_test.cc: what the host keeps is what is at rest there, and what is left
// of a budget becomes work items and kept records.
#include "core/plan/host_plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/bytes.h"
#include "core/plan/memory.h"

namespace ziggurat {
namespace plan_host_plan_test {

ModelSpec model_of(std::initializer_list<std::int64_t> units) {
  ModelSpec model{.name = "m", .units = {}};
  for (const std::int64_t count : units)
    model.units.push_back({"unit", {{.name = "weight", .shape = {count}}}});
  return model;
}

/// The training state among what is on the host for good.
std::uint64_t state_bytes(const HostPlan& plan) {
  return plan.permanent_bytes - plan.norm_bytes - plan.bucket_bytes - plan.quantized_bytes -
         plan.staged_bytes + plan.gradient_bytes;
}

/// Ranks, and how they share a state.
struct World {
  int ranks;
  StrategyRequest request;
  Quantization quantization{};

  Sharding sharding() const {
    Sharding sharding = Sharding::of(resolve(request, ranks), 0);
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
TEST(HostPlan, HasTheStateThatIsAtRestThereOfAPartOfEveryLayer) {
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
                                             .placement = Placement{}});
      EXPECT_NEAR(
          static_cast<double>(state_bytes(plan)) / static_cast<double>(memory.bytes(Tier::kHost)),
          1, 0.02)  // a lease's rounding up to a page is 1 % of the smallest slices here
          << to_string(strategy) << " of " << world.ranks << " x " << parts;
      EXPECT_EQ(memory.bytes(StateClass::kMasters) + memory.bytes(StateClass::kMoments),
                table.total_record_bytes());
    }
  }
}

TEST(HostPlan, HasTheStateThatIsAtRestThereForEveryStrategyPlacementFormatAndChunk) {
  const ModelSpec model = model_of({900'000, 2'359'296, 2'359'296, 70'000});
  const ReductionSettings reduction{.dtype = DType::kBFloat16,
                                    .bucket_elements = kReduceBucketCount};
  for (const char* text :
       {"all=host", "all=nvme", "params=host,grads=host,optimizer=nvme",
        "params=device,grads=host,optimizer=host", "params=nvme,grads=device,optimizer=nvme"}) {
    const Placement placement = parse_placement(text);
    for (const StateFormat format : {StateFormat::kFp32, StateFormat::k8Bit, StateFormat::kBf16}) {
      for (const World& world : worlds()) {
        for (const std::uint64_t tiles : {std::uint64_t{1}, std::uint64_t{7}, kChunkTilesMax}) {
          const StateKind state{.format = format};
          const Strategy strategy = resolve(world.request, world.ranks);
          const ChunkTable table(model, tiles, state, world.sharding());
          const HostPlan plan = plan_host(table, placement, reduction, 64 * kMiB);
          const RankMemory memory = rank_memory({.model = model_size(model, 1),
                                                 .recipe = {.state = state},
                                                 .strategy = strategy,
                                                 .placement = placement,
                                                 .chunk_tiles_max = tiles});
          const auto at_rest = static_cast<double>(memory.bytes(Tier::kHost));
          EXPECT_NEAR(static_cast<double>(state_bytes(plan)), at_rest, 0.01 * at_rest)
              << text << ", " << to_string(format) << ", " << to_string(strategy) << " of "
              << world.ranks << ", chunks of " << tiles;
        }
      }
    }
  }
}

// Buckets are in host memory wherever the device's is; what is gathered passes through it on the
// way to a GPU, piece by piece.
TEST(HostPlan, HasRoomForPiecesThatAreGatheredOnTheirWayToAGpu) {
  const ModelSpec model = model_of({900'000, 2'359'296, 70'000});
  const std::uint64_t page = PinnedPoolOptions{}.alignment_bytes;
  for (const World& world : worlds()) {
    const Sharding sharding = world.sharding();
    const ChunkTable table(model, kChunkTilesMax, {}, sharding);
    // A piece of one tile of each slice, of a few, and of the largest unit whole.
    for (const std::uint64_t tiles : {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{1000}}) {
      ReductionSettings reduction{
          .dtype = DType::kBFloat16,
          .bucket_elements =
              tiles * kTileElements * static_cast<std::uint64_t>(sharding.world_size)};
      const HostPlan host = plan_host(table, Placement{}, reduction, 64 * kMiB);
      reduction.staged = true;
      const HostPlan gpu = plan_host(table, Placement{}, reduction, 64 * kMiB);
      EXPECT_EQ(host.staged_bytes, 0U);
      EXPECT_EQ(gpu.permanent_bytes - host.permanent_bytes,
                gpu.staged_bytes + gpu.bucket_bytes - host.bucket_bytes);
      if (!sharding.quantization.gradients()) {
        EXPECT_EQ(gpu.bucket_bytes, host.bucket_bytes);
      }
      const std::uint64_t piece_bytes =
          std::min(reduction.bucket_elements, table.largest_unit_padded_count()) * sizeof(bf16);
      const std::uint64_t wanted = sharding.params_sharded() ? kStagedGathers * piece_bytes : 0;
      EXPECT_GE(gpu.staged_bytes, wanted) << tiles << " tiles of " << world.ranks << " ranks";
      EXPECT_LE(gpu.staged_bytes, wanted == 0 ? 0 : wanted + 2 * page)
          << tiles << " tiles of " << world.ranks << " ranks";
    }
  }
}

// The model has 7 chunks of 2 tiles each; a record has 384 KiB and a page.
TEST(HostPlan, WhatABudgetLeavesBecomesWorkItemsAndThenKeptRecords) {
  const ChunkTable table(model_of({14 * 16'384}), 2);
  const auto plan_with = [&](std::uint64_t more_bytes) {
    const std::uint64_t smallest = plan_host(table, Placement{}, {}, 0).smallest_bytes();
    return plan_host(table, Placement{}, {}, smallest + more_bytes);
  };
  constexpr std::uint64_t kItem = 2 * 16'384 * 12 + 4096;
  EXPECT_EQ(plan_with(0).items, 1u);
  EXPECT_EQ(plan_with(kItem - 1).items, 1u);
  EXPECT_EQ(plan_with(kItem).items, 2u);
  // Six beside the reserve: as many as the other chunks need. So one is kept, and then all.
  EXPECT_EQ(plan_with(5 * kItem).kept_bytes, 0u);
  EXPECT_EQ(plan_with(7 * kItem).kept_bytes, 7 * kItem);
  EXPECT_EQ(plan_with(0).comfortable_bytes(), plan_with(0).smallest_bytes() + 11 * kItem);
}

}  // namespace plan_host_plan_test
}  // namespace ziggurat
