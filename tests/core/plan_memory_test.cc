// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_memory_test.cc: bytes of a rank against the ZeRO papers' tables, and the laws
// of padding.
#include "core/plan/memory.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/sharding/chunk_table.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace plan_memory_test {

constexpr double kGB = 1e9;
constexpr Placement kAllOnDevice{Tier::kDevice, Tier::kDevice, Tier::kDevice};

double gb(std::uint64_t size_bytes) { return static_cast<double>(size_bytes) / kGB; }

MemoryRequest request(std::uint64_t count, const StrategyRequest& strategy, int dp,
                      StateKind state = {}) {
  return {.model = model_size(count, 1),
          .recipe = {.dtype = DType::kFloat16, .reduce_dtype = DType::kFloat16, .state = state},
          .strategy = resolve(strategy, dp),
          .placement = kAllOnDevice};
}

/// The papers' formula, which is also what a rank has, but for stage 1's gradients: here they are
/// never whole.
double states_gb(std::uint64_t count, int stage, int dp, StateKind state = {}) {
  const MemoryRequest one = request(count, {.zero_stage = stage}, dp, state);
  const double published = published_state_bytes(one.model, one.recipe, one.strategy);
  const auto here = static_cast<double>(rank_memory(one).model_state_bytes());
  const auto psi = static_cast<double>(count);
  const double never_whole = stage == 1 ? 2 * psi - 2 * psi / dp : 0;
  EXPECT_NEAR(here, published - never_whole, 64) << "stage " << stage << " on " << dp;
  return published / kGB;
}

/// The matrices of a GPT block, as the papers count: 12 h^2 elements.
ModelSpec blocks(std::int64_t layers, std::int64_t hidden) {
  ModelSpec model{.name = "blocks", .units = {}};
  for (std::int64_t i = 0; i < layers; ++i) {
    model.units.push_back({"block", {{.name = "weight", .shape = {12 * hidden, hidden}}}});
  }
  return model;
}

// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
// figure 1: 7.5 B parameters on 64 ranks, K = 12.
TEST(ShardingMemory, GivesZerosFigure1) {
  EXPECT_NEAR(states_gb(7'500'000'000, 0, 64), 120.0, 0.05);
  EXPECT_NEAR(states_gb(7'500'000'000, 1, 64), 31.4, 0.05);
  EXPECT_NEAR(states_gb(7'500'000'000, 2, 64), 16.6, 0.05);
  EXPECT_NEAR(states_gb(7'500'000'000, 3, 64), 1.9, 0.05);
}

// The same paper, table 1: per-device GB of model states by the degree of data parallelism.
TEST(ShardingMemory, GivesZerosTable1) {
  struct Row {
    int dp;
    double published_gb[3][3];  // of 7.5, 128 and 1000 B parameters: stages 1, 2, 3
  };
  const Row rows[] = {{1, {{120, 120, 120}, {2048, 2048, 2048}, {16000, 16000, 16000}}},
                      {4, {{52.5, 41.3, 30}, {896, 704, 512}, {7000, 5500, 4000}}},
                      {16, {{35.6, 21.6, 7.5}, {608, 368, 128}, {4750, 2875, 1000}}},
                      {64, {{31.4, 16.6, 1.88}, {536, 284, 32}, {4187, 2218, 250}}},
                      {256, {{30.4, 15.4, 0.47}, {518, 263, 8}, {4046, 2054, 62.5}}},
                      {1024, {{30.1, 15.1, 0.12}, {513, 257, 2}, {4011, 2013, 15.6}}}};
  const std::uint64_t counts[] = {7'500'000'000, 128'000'000'000, 1'000'000'000'000};
  for (const Row& row : rows) {
    for (int model = 0; model < 3; ++model) {
      for (int stage = 1; stage <= 3; ++stage) {
        const double published = row.published_gb[model][stage - 1];
        // Printed to three digits.
        EXPECT_NEAR(states_gb(counts[model], stage, row.dp), published, 0.005 * published + 0.01)
            << gb(counts[model]) << " B on " << row.dp << ", stage " << stage;
      }
    }
  }
}

// (4 + K) Psi and its parts, K = 12 and 8, for the sizes that people ask about.
TEST(ShardingMemory, GivesTheFormulasOf7BAnd70BOn256And175BOn1024) {
  const StateKind k12{};
  const StateKind k8{.format = StateFormat::kBf16Moments};
  EXPECT_NEAR(states_gb(7'000'000'000, 3, 1, k12), 112, 1e-6);
  EXPECT_NEAR(states_gb(7'000'000'000, 3, 1, k8), 84, 1e-6);
  EXPECT_NEAR(states_gb(70'000'000'000, 3, 256, k12), 4.375, 1e-6);
  EXPECT_NEAR(states_gb(70'000'000'000, 2, 256, k12), 140 + 14 * 70 / 256.0, 1e-6);
  EXPECT_NEAR(states_gb(70'000'000'000, 3, 256, k8), 12 * 70 / 256.0, 1e-6);
  EXPECT_NEAR(states_gb(175'000'000'000, 3, 1024, k12), 16 * 175 / 1024.0, 1e-6);
  EXPECT_NEAR(states_gb(175'000'000'000, 1, 1024, k12), 700 + 12 * 175 / 1024.0, 1e-6);
  EXPECT_NEAR(states_gb(175'000'000'000, 3, 1024, k8), 12 * 175 / 1024.0, 1e-6);
}

// Rajbhandari et al. 2021, "ZeRO-Infinity", figure 2a: model states in TiB, at 20 bytes a parameter
// (equation 2), of which 4 are an fp32 copy of all gradients that is not made here.
TEST(ShardingMemory, GivesZeroInfinitysModelsFromTheirDimensions) {
  struct Row {
    std::int64_t layers, hidden;
    double published_tib;
  };
  for (const Row& row : {Row{80, 10 * 1024, 1.83}, Row{100, 20 * 1024, 9.16},
                         Row{128, 25 * 1024, 18.31}, Row{195, 64 * 1024, 182.81}}) {
    MemoryRequest one = request(1, {}, 1);
    one.model = model_size(blocks(row.layers, row.hidden), 1);
    const double tib = static_cast<double>(rank_memory(one).model_state_bytes()) / 0x1p40;
    EXPECT_NEAR(tib * 20 / 16, row.published_tib, 0.006) << row.layers << " x " << row.hidden;
  }
}

// Ren et al. 2021, "ZeRO-Offload", section 4: 2 Psi on the device; gradients, masters and moments,
// 14 Psi / N, on the host.
TEST(ShardingMemory, GivesZeroOffloadsSplit) {
  MemoryRequest offloaded = request(10'000'000'000, {.zero_stage = 2}, 16);
  offloaded.placement = {Tier::kDevice, Tier::kHost, Tier::kHost};
  const RankMemory memory = rank_memory(offloaded);
  EXPECT_EQ(memory.bytes(Tier::kDevice), 20'000'000'000u);
  EXPECT_EQ(memory.bytes(Tier::kHost), 8'750'000'000u);
}

// Wang et al. 2023, "ZeRO++", section 4.2: everything over the world, and 2 Psi / P more.
TEST(ShardingMemory, HpzAddsASecondCutAndAHybridMultipliesTheFirst) {
  const RankMemory hpz = rank_memory(request(64'000'000, {.hpz = 8}, 64));
  EXPECT_EQ(hpz.bytes(StateClass::kSecondaryParams), 2u * 64'000'000 / 8);
  EXPECT_EQ(hpz.bytes(StateClass::kParams), 2u * 64'000'000 / 64);
  EXPECT_EQ(hpz.model_state_bytes(), 16u * 64'000'000 / 64 + 2u * 64'000'000 / 8);

  const RankMemory hybrid =
      rank_memory(request(64'000'000, {.name = StrategyName::kHybrid, .shard_group = 8}, 64));
  EXPECT_EQ(hybrid.bytes(StateClass::kSecondaryParams), 0u);
  EXPECT_EQ(hybrid.model_state_bytes(), 16u * 64'000'000 / 8);
}

TEST(ShardingMemory, PaddingIsWhatIsKeptBeyondAnEqualShare) {
  MemoryRequest small = request(1, {}, 4);
  small.model = model_size(blocks(5, 300), 1);  // 1,080,000 elements: 66 tiles, of 17 slices of 4
  const RankMemory memory = rank_memory(small);
  const std::uint64_t exact = 5 * 1'080'000 / 4 * 16;
  EXPECT_EQ(memory.model_state_bytes(), 5 * 17 * kTileElements * 16);
  EXPECT_EQ(memory.padding_bytes, memory.model_state_bytes() - exact);
}

// The account is that of the table which the engine cuts its state by, in every stage.
TEST(ShardingMemory, AgreesWithTheChunkTableOfEveryStage) {
  const ModelSpec model = blocks(3, 999);
  for (const int ranks : {1, 2, 3, 8}) {
    for (const StateFormat format : {StateFormat::kFp32, StateFormat::k8Bit, StateFormat::kBf16}) {
      for (const std::uint64_t tiles : {1u, 7u, 32u}) {
        for (int stage = 0; stage <= 3; ++stage) {
          const StateKind state{.format = format};
          const ChunkTable table(model, tiles, state,
                                 {.stage = stage, .rank = ranks - 1, .world_size = ranks});
          MemoryRequest one = request(1, {.zero_stage = stage}, ranks, state);
          one.model = model_size(model, 1);
          one.chunk_tiles_max = tiles;
          const RankMemory memory = rank_memory(one);
          SCOPED_TRACE(::testing::Message() << to_string(format) << " in chunks of " << tiles
                                            << ", stage " << stage << " of " << ranks);
          EXPECT_EQ(memory.bytes(StateClass::kMasters) + memory.bytes(StateClass::kMoments),
                    table.total_record_bytes());
          std::uint64_t home_count = 0;
          for (UnitId u = 0; u < table.unit_count(); ++u) home_count += table.home_count(u);
          EXPECT_EQ(memory.bytes(StateClass::kParams), home_count * 2);
          std::uint64_t grad_bytes = 0;
          for (const Chunk& chunk : table.chunks()) grad_bytes += chunk.param_bytes();
          EXPECT_EQ(memory.bytes(StateClass::kGradients), grad_bytes);
        }
      }
    }
  }
}

TEST(ShardingMemory, RecordsOnNvmeHaveTwoSlotsUnlessToldOtherwise) {
  MemoryRequest swept = request(1'000'000, {}, 1);
  swept.placement = {};
  EXPECT_EQ(rank_memory(swept).bytes(Tier::kNvme), 24'000'000u);
  EXPECT_EQ(rank_memory(swept).model_state_bytes(), 16'000'000u);
  swept.slots = 1;
  EXPECT_EQ(rank_memory(swept).bytes(Tier::kNvme), 12'000'000u);
}

// Wherever records are, the store has room for them: a checkpoint is written there.
TEST(ShardingMemory, RecordsThatAreElsewhereHaveRoomForTheirCheckpointOnNvme) {
  MemoryRequest one = request(1'000'000, {}, 1);
  one.placement = {Tier::kHost, Tier::kHost, Tier::kHost};
  const RankMemory memory = rank_memory(one);
  EXPECT_EQ(memory.bytes(StateClass::kCheckpoint, Tier::kNvme), 24'000'000u);
  EXPECT_EQ(memory.bytes(Tier::kHost), 16'000'000u);
  EXPECT_EQ(memory.model_state_bytes(), 16'000'000u);
}

TEST(ShardingMemory, TensorParallelRanksDivideWhatIsMarkedAndRoundUp) {
  const ModelSpec model{"m",
                        {{"unit",
                          {{.name = "columns", .shape = {8, 10}, .tp_dim = 1},
                           {.name = "rows", .shape = {10, 8}, .tp_dim = 0},
                           {.name = "norm", .shape = {8}}}}}};
  EXPECT_EQ(model_size(model, 1).rank_count(), 168u);
  EXPECT_EQ(model_size(model, 2).rank_count(), 40u + 40 + 8);
  EXPECT_EQ(model_size(model, 4).rank_count(), 24u + 24 + 8);  // 10 / 4: 3, padded
  EXPECT_EQ(model_size(std::uint64_t{1000}, 3).rank_count(), 334u);
}

}  // namespace plan_memory_test
}  // namespace ziggurat
