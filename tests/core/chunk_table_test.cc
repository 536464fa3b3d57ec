// SPDX-License-Identifier: Apache-2.0
// tests/core/chunk_table_test.cc: units are covered by chunks without gap or overlap, and a layout
// says which model it is of.
#include "core/sharding/chunk_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "core/sharding/param_groups.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace {

class EveryChunkSize : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(EveryChunkSize, CoversEveryUnitOnceInWholeTiles) {
  const ModelSpec model = small_model();
  const ChunkTable table(model, GetParam());
  std::uint64_t tiles = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    const UnitChunks& unit = table.unit(u);
    EXPECT_EQ(unit.count, model.units[u].count());
    EXPECT_EQ(unit.first_tile, tiles);
    EXPECT_LT(unit.padded_count - unit.count, kTileElements);
    std::uint64_t next = 0;
    for (ChunkId id = unit.first_chunk; id < unit.first_chunk + unit.chunk_count; ++id) {
      const Chunk& chunk = table.chunk(id);
      EXPECT_EQ(chunk.unit, u);
      EXPECT_EQ(chunk.begin, next);
      EXPECT_EQ(chunk.count % kTileElements, 0U);
      EXPECT_GT(chunk.count, 0U);
      EXPECT_LE(chunk.count, GetParam() * kTileElements);
      next += chunk.count;
    }
    EXPECT_EQ(next, unit.padded_count);
    tiles += unit.padded_count / kTileElements;
  }
  EXPECT_EQ(table.tile_count(), tiles);
}

TEST_P(EveryChunkSize, DecayRunsSayOfEveryElementWhatItsParameterSays) {
  const ModelSpec model = small_model();
  const ChunkTable table(model, GetParam());
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const Chunk& chunk = table.chunk(id);
    const std::uint64_t weights = model.units[chunk.unit].params[0].count();
    std::size_t next = 0;
    for (const DecayRun& run : table.decay_runs(id)) {
      ASSERT_EQ(run.begin, next);
      for (std::size_t i = run.begin; i < run.end; ++i)
        ASSERT_EQ(run.decay, chunk.begin + i < weights);
      next = run.end;
    }
    EXPECT_EQ(next, chunk.count);
  }
}

TEST_P(EveryChunkSize, RunsSayOfEveryElementWhichGroupItsParameterFellTo) {
  ModelSpec model = small_model();
  const std::vector<ParamGroup> groups{{.params = "unit3.bias"}, {.params = "unit?.weight"}};
  assign_groups(model, groups);
  const ChunkTable table(model, GetParam());
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const Chunk& chunk = table.chunk(id);
    const std::uint64_t weights = model.units[chunk.unit].params[0].count();
    for (const DecayRun& run : table.decay_runs(id)) {
      for (std::size_t i = run.begin; i < run.end; ++i) {
        const std::uint64_t element = chunk.begin + i;
        const bool padding = element >= table.unit(chunk.unit).count;
        const std::uint32_t bias = chunk.unit == 3 && !padding ? 1 : 0;
        ASSERT_EQ(run.group, element < weights ? 2U : bias) << element;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ChunkTable, EveryChunkSize, ::testing::Values(1, 2, 3, 1000));

TEST(ChunkTable, ALayoutGivesTheSameTableBack) {
  const ModelSpec model = small_model();
  const ChunkTable table(model, 2);
  const ChunkTable again = ChunkTable::from_layout(model, table.layout());
  EXPECT_EQ(again.record_bytes(), table.record_bytes());
  EXPECT_EQ(ChunkTable::model_name(table.layout()), "small");
}

TEST(ChunkTable, ALayoutKnowsTheTypeOfParametersAndRefusesAnother) {
  ModelSpec model = small_model();
  const ChunkTable halves(model, 2);
  model.dtype = DType::kFloat32;
  const ChunkTable table(model, 2);
  EXPECT_EQ(ChunkTable::param_dtype(halves.layout()), DType::kBFloat16);
  EXPECT_EQ(ChunkTable::param_dtype(table.layout()), DType::kFloat32);
  EXPECT_EQ(table.chunk(0).param_bytes(), 2 * halves.chunk(0).param_bytes());
  EXPECT_EQ(table.unit_param_bytes(1), 2 * halves.unit_param_bytes(1));
  EXPECT_EQ(table.record_bytes(), halves.record_bytes());
  try {
    ChunkTable::from_layout(model, halves.layout());
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("parameters are bf16, this run's fp32"));
  }
  EXPECT_THROW(ChunkTable::param_dtype(R"({"param": "int4, rounded"})"), Error);
}

TEST(ChunkTable, ALayoutDoesNotKnowGroups) {
  const ModelSpec model = small_model();
  ModelSpec grouped = model;
  const std::vector<ParamGroup> groups{{.params = "*bias", .weight_decay = 1.0F}};
  assign_groups(grouped, groups);
  EXPECT_EQ(ChunkTable(grouped, 2).layout(), ChunkTable(model, 2).layout());
}

TEST(ParamGroups, PatternsStandForNames) {
  EXPECT_TRUE(matches("wte.weight", "wte.weight"));
  EXPECT_FALSE(matches("wte.weight", "wte.weights"));
  EXPECT_FALSE(matches("wte.weight", "wte.weigh"));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("h.*.ln_?.*", "h.11.ln_1.bias"));
  EXPECT_FALSE(matches("h.*.ln_?.*", "h.11.ln_.bias"));
  EXPECT_TRUE(matches("*ab*ab", "abxabab"));
  EXPECT_FALSE(matches("*ab*ab", "ab"));
  EXPECT_FALSE(matches("", "x"));
  EXPECT_FALSE(matches("?", ""));
}

TEST(ParamGroups, TheFirstThatHasTheNameHasTheParameter) {
  ModelSpec model = small_model();
  const std::vector<ParamGroup> groups{{.params = "unit1.*"}, {.params = "*.bias"}};
  assign_groups(model, groups);
  EXPECT_EQ(model.units[0].params[0].group, 0U);
  EXPECT_EQ(model.units[0].params[1].group, 2U);
  EXPECT_EQ(model.units[1].params[0].group, 1U);
  EXPECT_EQ(model.units[1].params[1].group, 1U);
}

TEST(ParamGroups, OneThatNothingFallsToIsRefused) {
  ModelSpec model = small_model();
  EXPECT_THROW(assign_groups(model, std::vector<ParamGroup>{{.params = "layer*"}}), Error);
  EXPECT_THROW(assign_groups(model, std::vector<ParamGroup>{{.params = "*", .lr_scale = -1}}),
               Error);
}

TEST(ChunkTable, RecordsAreAsLongAsTheirFormatSays) {
  const ModelSpec model = small_model();
  const StateKind state{OptimizerKind::kLion, StateFormat::k8Bit};
  const RecordFormat lion = record_format(state);
  const ChunkTable table(model, 2, state);
  std::uint64_t total = 0;
  for (const Chunk& chunk : table.chunks()) {
    EXPECT_EQ(chunk.record_bytes(), lion.record_bytes(chunk.count / kTileElements));
    EXPECT_LE(chunk.record_bytes(), table.largest_record_bytes());
    total += chunk.record_bytes();
  }
  EXPECT_EQ(table.total_record_bytes(), total);
  EXPECT_EQ(ChunkTable(model, 2).chunk(0).record_bytes(), table.chunk(0).count * 12);
}

TEST(ChunkTable, AnotherOptimizerOrFormatThanTheStoresIsRefusedNamingBoth) {
  const ModelSpec model = small_model();
  const StateKind stored{OptimizerKind::kAdam, StateFormat::kSplit};
  const std::string layout = ChunkTable(model, 2, stored).layout();
  EXPECT_EQ(ChunkTable::state_of(layout), stored);
  EXPECT_EQ(ChunkTable::from_layout(model, layout, stored).record_format(), record_format(stored));
  // Adam's records have the arrays of AdamW's, and other numbers in them.
  for (const StateKind& state : {StateKind{OptimizerKind::kAdamW, StateFormat::kSplit},
                                 StateKind{OptimizerKind::kAdam, StateFormat::kFp32}}) {
    try {
      ChunkTable::from_layout(model, layout, state);
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("store's state is adam in split"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("this run's " + to_string(state)));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("--optimizer adam --state-format split"));
    }
  }
}

TEST(ChunkTable, ALayoutOfBeforeThereWasAChoiceIsAdamWInFp32) {
  const ModelSpec model = small_model();
  auto layout = nlohmann::json::parse(ChunkTable(model, 2).layout());
  layout.erase("optimizer");
  layout.erase("state_format");
  EXPECT_EQ(ChunkTable::state_of(layout.dump()), StateKind{});
  EXPECT_EQ(ChunkTable::from_layout(model, layout.dump()).chunks().size(),
            ChunkTable(model, 2).chunks().size());
}

TEST(ChunkTable, AModelWithoutUnitsOrParametersIsRefused) {
  EXPECT_THROW(ChunkTable({.name = "none", .units = {}}, 1), Error);
  EXPECT_THROW(ChunkTable({.name = "hollow", .units = {{.name = "u", .params = {}}}}, 1), Error);
}

TEST(ChunkTable, ALayoutThatIsNotJsonIsDataLoss) {
  EXPECT_THROW(ChunkTable::model_name("{"), Error);
  EXPECT_THROW(ChunkTable::model_name("[]"), Error);
}

TEST(Placement, ReadsClassesAndAll) {
  const Placement placement = parse_placement("all=host,optimizer=nvme");
  EXPECT_EQ(to_string(placement), "params=host,grads=host,optimizer=nvme");
  for (const char* wrong : {"params", "params=disk", "weights=host", "=host", "all="}) {
    EXPECT_THROW(parse_placement(wrong), Error) << wrong;
  }
}

}  // namespace
}  // namespace ziggurat::testing
