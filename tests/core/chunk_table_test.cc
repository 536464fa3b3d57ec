// SPDX-License-Identifier: Apache-2.0
// tests/core/chunk_table_test.cc: units are covered by chunks without gap or overlap, and a layout
// says which model it is of.
#include "core/sharding/chunk_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "core/sharding/param_groups.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace chunk_table_test {

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
    EXPECT_THAT(error.what(), ::testing::HasSubstr("parameters are bf16, but this run's are fp32"));
  }
  EXPECT_THROW(ChunkTable::param_dtype(R"({"param": "int4, rounded"})"), Error);
}

TEST(ChunkTable, ALayoutNamesItsRounding) {
  const ModelSpec model = small_model();
  const StateKind state{OptimizerKind::kAdamW, StateFormat::kBf16};
  const Roundings rounding{.state = Rounding::kStochastic};
  const ChunkTable table(model, 2, state, {}, rounding);
  EXPECT_EQ(ChunkTable::from_layout(model, table.layout(), state).rounding(), rounding);
  EXPECT_EQ(ChunkTable::of_layout(table.layout(), 0).rounding(), rounding);
  const ChunkTable before(model, 2, state);
  EXPECT_EQ(before.layout().find("rounding"), std::string::npos);
  EXPECT_EQ(ChunkTable::from_layout(model, before.layout(), state).rounding(), std::nullopt);
  EXPECT_FALSE(before.decay_runs(0).front().place);
}

/// Every element of every parameter is keyed once, as its name and number in the whole, on whatever
/// rank it is.
TEST(ChunkTable, PlacesAreThoseOfElementsInTheWholeParameter) {
  ModelSpec whole = small_model();
  for (UnitSpec& unit : whole.units) {
    unit.params[0].shape = {unit.params[0].shape[0], 120};
    unit.params[0].tp_dim = 1;
    unit.params[0].tp_sections = 2;
  }
  constexpr int kParts = 3;
  const ModelSpec part = part_of(whole, kParts);
  const StateKind state{OptimizerKind::kAdamW, StateFormat::kBf16};
  std::map<std::uint64_t, std::vector<int>> seen;  // by name: how often each element
  for (const UnitSpec& unit : whole.units) {
    for (const ParamSpec& param : unit.params)
      seen[place_of(param, {}, 0).name].resize(param.count());
  }
  for (int tensor = 0; tensor < kParts; ++tensor) {
    for (int rank = 0; rank < 2; ++rank) {
      Sharding sharding{2, rank, 2};
      sharding.tensor = {.rank = tensor, .ranks = kParts};
      const ChunkTable table(part, 2, state, sharding, Roundings{.state = Rounding::kStochastic});
      for (ChunkId id = 0; id < table.chunks().size(); ++id) {
        for (const DecayRun& run : table.decay_runs(id)) {
          if (!run.place) continue;  // padding
          std::vector<int>& its = seen.at(run.place->name);
          for (std::size_t i = 0; i < run.end - run.begin; ++i) ++its.at(run.place->whole(i));
        }
      }
    }
  }
  for (const UnitSpec& unit : whole.units) {
    EXPECT_EQ(seen[place_of(unit.params[0], {}, 0).name],
              std::vector<int>(unit.params[0].count(), 1));
    EXPECT_EQ(seen[place_of(unit.params[1], {}, 0).name],
              std::vector<int>(unit.params[1].count(), kParts));
  }
}

TEST(ChunkTable, ALayoutDoesNotKnowGroups) {
  const ModelSpec model = small_model();
  ModelSpec grouped = model;
  const std::vector<ParamGroup> groups{{.params = "*bias", .weight_decay = 1.0F}};
  assign_groups(grouped, groups);
  EXPECT_EQ(ChunkTable(grouped, 2).layout(), ChunkTable(model, 2).layout());
}

/// small_model() with what matches `pattern` frozen.
ModelSpec frozen_model(const std::string& pattern) {
  ModelSpec model = small_model();
  const std::vector<ParamGroup> groups{{.params = pattern, .frozen = true}};
  assign_groups(model, groups);
  return model;
}

TEST(ChunkTable, AFrozenUnitHasItsMastersOnceAndNothingElse) {
  const ChunkTable plain(small_model(), 2);
  const ChunkTable table(frozen_model("unit3.*"), 2);
  EXPECT_EQ(table.unit(3).updated_count, 0U);
  EXPECT_EQ(table.unit(4).updated_count, plain.unit(4).chunk_count);
  EXPECT_EQ(table.updated_count() + table.unit(3).chunk_count, table.chunks().size());
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    EXPECT_EQ(table.chunk(id).begin, plain.chunk(id).begin);
    if (table.chunk(id).unit == 3) {
      EXPECT_EQ(table.chunk(id).record_bytes(), table.chunk(id).count * sizeof(float));
    } else {
      EXPECT_EQ(table.chunk(id).record_bytes(), plain.chunk(id).record_bytes());
    }
  }
}

TEST(ChunkTable, ChunksEndWhereAFrozenParameterHasWholeTiles) {
  // Weights of 38,400 elements and a bias of 300: two whole tiles, and one that has both.
  const ChunkTable weights(frozen_model("unit3.weight"), 1000);
  ASSERT_EQ(weights.unit(3).chunk_count, 2U);
  const ChunkId first = weights.unit(3).first_chunk;
  EXPECT_TRUE(weights.chunk(first).constant);
  EXPECT_EQ(weights.chunk(first).count, 2 * kTileElements);
  EXPECT_FALSE(weights.chunk(first + 1).constant);
  EXPECT_EQ(ChunkTable(frozen_model("*.bias"), 1000).updated_count(), 5U)
      << "no bias has a tile to itself";
}

TEST(ChunkTable, WhatWasFrozenWhenTheStoreWasMadeStaysFrozen) {
  const ChunkTable table(frozen_model("unit3.weight"), 2);
  try {
    ChunkTable::from_layout(small_model(), table.layout());
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'unit3.weight' was frozen when the store"));
  }
  const ChunkTable again = ChunkTable::from_layout(frozen_model("unit3.*"), table.layout());
  EXPECT_EQ(again.record_bytes(), table.record_bytes()) << "what is frozen since stays as it is";
  const ChunkTable plain(small_model(), 2);
  EXPECT_EQ(ChunkTable::from_layout(frozen_model("*"), plain.layout()).updated_count(),
            plain.chunks().size());
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
      EXPECT_THAT(error.what(), ::testing::HasSubstr("this run's is " + to_string(state)));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("`optimizer=adam` `state_format=split`"));
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

TEST(Placement, DividesTheOptimizerFromTheTop) {
  const Placement placement =
      parse_placement("params=host,optimizer=device:2GiB,host:1.5GiB,nvme,grads=device");
  EXPECT_EQ(placement.grads, Tier::kDevice);
  EXPECT_EQ(placement.optimizer, Tier::kNvme);
  EXPECT_EQ(placement.device_record_bytes, 2 * kGiB);
  EXPECT_EQ(placement.host_record_bytes, 1536 * kMiB);
  const char* const text = "params=host,grads=device,optimizer=device:2GiB,host:1536MiB,nvme";
  EXPECT_EQ(to_string(placement), text);
  EXPECT_EQ(to_string(parse_placement(text)), text);
  const Placement again = parse_placement("optimizer=device:1MiB,nvme,optimizer=host");
  EXPECT_EQ(to_string(again), "params=host,grads=host,optimizer=host") << "the last one counts";
}

TEST(Placement, SaysWhichShareIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"optimizer=device,nvme", "'device' has no size"},
      {"optimizer=device:1GiB", "no tier after it"},
      {"optimizer=host:1GiB,device", "'device' cannot come after 'host'"},
      {"optimizer=host:1GiB,host:1GiB,nvme", "'host' cannot come after 'host'"},
      {"optimizer=device:much,nvme", "device:much"},
      {"params=device:1GiB,host", "only optimizer can be divided"},
      {"nvme", "'' is not a tier"}};
  for (const auto& [text, why] : cases) {
    try {
      parse_placement(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(why)) << text;
    }
  }
}

struct Ranks {
  int world_size;
  std::uint64_t chunk_tiles_max;
};
void PrintTo(const Ranks& ranks, std::ostream* out) {
  *out << ranks.world_size << "Ranks" << ranks.chunk_tiles_max << "Tiles";
}

class AmongRanks : public ::testing::TestWithParam<Ranks> {
 protected:
  ChunkTable table(int stage, int rank) const {
    return {model_, GetParam().chunk_tiles_max, {}, {stage, rank, GetParam().world_size}};
  }
  const ModelSpec model_ = small_model();
  const int world_size_ = GetParam().world_size;
};

TEST_P(AmongRanks, EveryTileIsUpdatedByOneRankOrByAll) {
  for (const int stage : {0, 1, 2, 3}) {
    std::vector<int> updates(table(stage, 0).tile_count());
    for (int rank = 0; rank < world_size_; ++rank) {
      const ChunkTable mine = table(stage, rank);
      for (ChunkId id = 0; id < mine.chunks().size(); ++id) {
        const Chunk& chunk = mine.chunk(id);
        ASSERT_LE(chunk.begin + chunk.count, mine.unit(chunk.unit).padded_count);
        const std::uint64_t first = mine.unit(chunk.unit).first_tile + chunk.begin / kTileElements;
        for (std::uint64_t i = 0; i < chunk.count / kTileElements; ++i) ++updates[first + i];
      }
    }
    EXPECT_THAT(updates, ::testing::Each(stage == 0 ? world_size_ : 1)) << "stage " << stage;
  }
}

TEST_P(AmongRanks, SlicesAreEqualAndNoLongerThanPaddingToATileMakesThem) {
  const ChunkTable one(model_, GetParam().chunk_tiles_max);
  const ChunkTable mine = table(2, world_size_ - 1);
  const auto ranks = static_cast<std::uint64_t>(world_size_);
  for (UnitId u = 0; u < mine.unit_count(); ++u) {
    EXPECT_EQ(mine.unit(u).padded_count, mine.unit(u).slice_count * ranks);
    EXPECT_EQ(mine.own_begin(u), mine.unit(u).slice_count * (ranks - 1));
    EXPECT_LT(mine.unit(u).padded_count, one.unit(u).padded_count + ranks * kTileElements);
  }
}

TEST_P(AmongRanks, EverySliceIsCutAlike) {
  const ChunkTable whole = table(0, 0);
  for (int rank = 0; rank < world_size_; ++rank) {
    const ChunkTable mine = table(1, rank);
    for (UnitId u = 0; u < mine.unit_count(); ++u) {
      const auto cut = whole.slice_chunks(u);
      const auto own = mine.slice_chunks(u);
      ASSERT_EQ(own.size(), cut.size());
      ASSERT_EQ(mine.unit(u).chunk_count, own.size());
      ASSERT_EQ(whole.unit(u).chunk_count, own.size() * static_cast<std::size_t>(world_size_));
      for (std::size_t i = 0; i < own.size(); ++i) {
        EXPECT_EQ(own[i].begin, mine.own_begin(u) + cut[i].begin);
        EXPECT_EQ(own[i].count, cut[i].count);
      }
    }
  }
}

TEST_P(AmongRanks, NoiseIsKeyedAsWhereOneRankHasTheModel) {
  const ChunkTable alone(model_, 1U << 20);
  for (int rank = 0; rank < world_size_; ++rank) {
    const ChunkTable mine = table(3, rank);
    for (ChunkId id = 0; id < mine.chunks().size(); ++id) {
      const Chunk& chunk = mine.chunk(id);
      const ChunkId first = alone.unit(chunk.unit).first_chunk;
      EXPECT_EQ(mine.first_element(id), alone.first_element(first) + chunk.begin);
    }
  }
}

TEST_P(AmongRanks, AChunkIsConstantAsAWholeAndEverySliceIsStillCutAlike) {
  for (const char* pattern : {"unit3.*", "unit4.weight", "unit?.weight", "*.bias"}) {
    SCOPED_TRACE(pattern);
    const ModelSpec model = frozen_model(pattern);
    const ChunkTable plain = table(0, 0);
    const ChunkTable whole(model, GetParam().chunk_tiles_max, {}, {0, 0, world_size_});
    EXPECT_EQ(whole.padded_count(), plain.padded_count());
    std::vector<bool> trained(whole.tile_count(), false);
    for (UnitId u = 0; u < whole.unit_count(); ++u) {
      std::uint64_t element = whole.unit(u).first_tile * kTileElements;
      for (const ParamSpec& param : model.units[u].params) {
        for (const std::uint64_t end = element + param.count(); element < end; ++element)
          if (!param.frozen) trained[element / kTileElements] = true;
      }
    }
    for (int rank = 0; rank < world_size_; ++rank) {
      const ChunkTable mine(model, GetParam().chunk_tiles_max, {}, {1, rank, world_size_});
      for (UnitId u = 0; u < mine.unit_count(); ++u) {
        const auto cut = whole.slice_chunks(u);
        const auto own = mine.slice_chunks(u);
        const bool some = std::ranges::any_of(model.units[u].params, &ParamSpec::frozen);
        ASSERT_EQ(own.size(), cut.size());
        std::uint64_t next = mine.own_begin(u);
        for (std::size_t i = 0; i < own.size(); ++i) {
          ASSERT_EQ(own[i].begin, next);
          ASSERT_EQ(own[i].count, cut[i].count);
          next += own[i].count;
          const std::uint64_t tile = mine.unit(u).first_tile + own[i].begin / kTileElements;
          for (std::uint64_t t = tile; t < tile + own[i].count / kTileElements; ++t)
            ASSERT_EQ(own[i].constant, some && !trained[t]) << "tile " << t << " of unit " << u;
          ASSERT_TRUE(own[i].constant || !mine.constant_everywhere(u, i));
        }
        EXPECT_EQ(next, mine.own_begin(u) + mine.unit(u).slice_count);
      }
    }
  }
}

TEST_P(AmongRanks, ParametersStayWholeUpToStageTwo) {
  for (const int stage : {0, 1, 2, 3}) {
    const ChunkTable mine = table(stage, world_size_ - 1);
    for (UnitId u = 0; u < mine.unit_count(); ++u) {
      EXPECT_EQ(mine.home_begin(u), stage == 3 ? mine.own_begin(u) : 0U);
      EXPECT_EQ(mine.home_count(u),
                stage == 3 ? mine.unit(u).slice_count : mine.unit(u).padded_count);
    }
  }
}

TEST_P(AmongRanks, ALayoutIsOfSoManyRanksAndOfStagesOneToThreeOrOfStageZero) {
  const std::string sliced = table(1, 0).layout();
  EXPECT_EQ(sliced, table(3, 1).layout());
  const auto open = [&](const std::string& layout, int stage, int world_size) {
    return ChunkTable::from_layout(model_, layout, {}, {stage, 0, world_size});
  };
  EXPECT_EQ(open(sliced, 2, world_size_).record_bytes(), table(2, 0).record_bytes());
  const auto refusal = [&](const std::string& layout, int stage, int world_size) {
    try {
      open(layout, stage, world_size);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refusal(sliced, 2, 1),
              ::testing::HasSubstr("made by " + std::to_string(world_size_) + " ranks"));
  EXPECT_THAT(refusal(ChunkTable(model_, 2).layout(), 2, world_size_),
              ::testing::HasSubstr("made by 1 rank,"));
  EXPECT_THAT(refusal(sliced, 0, world_size_),
              ::testing::HasSubstr("made with `zero_stage=1, 2 or 3`, but this run has 0"));
  EXPECT_THAT(refusal(table(0, 0).layout(), 3, world_size_),
              ::testing::HasSubstr("made with `zero_stage=0`, but this run has 3"));
}

INSTANTIATE_TEST_SUITE_P(ChunkTable, AmongRanks,
                         ::testing::Values(Ranks{2, 1}, Ranks{2, 1000}, Ranks{3, 2}, Ranks{8, 1}));

TEST(ChunkTable, OneRankHasTheTableOfNoRanksWhateverTheStage) {
  const ModelSpec model = small_model();
  for (const int stage : {0, 1, 2, 3}) {
    const ChunkTable table(model, 2, {}, {stage, 0, 1});
    EXPECT_EQ(table.layout(), ChunkTable(model, 2).layout());
    EXPECT_EQ(table.record_bytes(), ChunkTable(model, 2).record_bytes());
  }
}

}  // namespace chunk_table_test
}  // namespace ziggurat::testing
