// SPDX-License-Identifier: Apache-2.0
// tests/core/hostile_layout_test.cc: the texts of a store's file, written by nobody we know: what
// they say is refused as data that is lost, before anything is sized by it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/piece_layout.h"
#include "core/sharding/stored_records.h"
#include "tiers/store/store_layout.h"

namespace ziggurat {
namespace hostile_layout_test {

using nlohmann::json;
using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& parse) {
  try {
    parse();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << error.what();
    return error.what();
  }
  return "taken";
}

/// `text` with the value at `pointer` replaced.
std::string with(const std::string& text, const char* pointer, const json& value) {
  json changed = json::parse(text);
  changed[json::json_pointer(pointer)] = value;
  return changed.dump();
}

class Layout : public ::testing::Test {
 protected:
  static constexpr StoredRecords kRecords{.count = 2, .size_bytes = 2 * kMiB};
  const std::string layout_ =
      ChunkTable({"m", {{"u", {{.name = "w", .shape = {300, 100}}}}}}, 1).layout();

  std::string refused(const std::string& layout) {
    return refusal([&] {
      require_records(layout, kRecords);
      static_cast<void>(ChunkTable::of_layout(layout, 0));
    });
  }
};

TEST_F(Layout, OfTheStoresOwnRecordsIsTaken) { EXPECT_EQ(refused(layout_), "taken"); }

TEST_F(Layout, OfMoreChunksOrTilesThanThereAreRecordsIsRefused) {
  const std::int64_t giant = std::int64_t{1} << 49;
  EXPECT_THAT(refused(with(layout_, "/units/0/params/0/shape", {giant})), HasSubstr("2 records"));
  const std::string one_chunk =
      with(with(layout_, "/units/0/params/0/shape", {giant}), "/chunk_tiles_max", UINT64_MAX);
  EXPECT_THAT(refused(with(one_chunk, "/units/0/params/0/constant", true)), HasSubstr("2 records"));
  EXPECT_THAT(refused(with(with(layout_, "/ranks", 99'999), "/slices_held", 99'999)),
              HasSubstr("2 records"));
}

TEST_F(Layout, WithNumbersThatMakeNoSenseIsRefused) {
  const std::int64_t giant = std::int64_t{1} << 40;
  for (const json& shape : {json{giant, giant}, json{0}, json{-1}, json{1.5}, json("x")})
    EXPECT_NE(refused(with(layout_, "/units/0/params/0/shape", shape)), "taken") << shape;
  for (const char* key : {"/chunk_tiles_max", "/ranks", "/tensor_parallel", "/shard_group"}) {
    for (const json& value : {json(0), json(-1), json("1"), json(1e300), json(4'294'967'297)}) {
      if (std::string(key) == "/chunk_tiles_max" && value == json(4'294'967'297)) continue;
      EXPECT_NE(refused(with(layout_, key, value)), "taken") << key << " " << value;
    }
  }
  EXPECT_NE(refused(with(layout_, "/units", json::array())), "taken");
  EXPECT_NE(refused(with(layout_, "/units/0/params", json::array())), "taken");
  EXPECT_NE(refused(with(layout_, "/units/0/params/0/decay", "yes")), "taken");
}

TEST_F(Layout, WithAUnitOfATypeThatNobodyKnowsIsRefused) {
  EXPECT_EQ(refused(with(layout_, "/units/0/param", "fp32")), "taken");
  EXPECT_THAT(refused(with(layout_, "/units/0/param", "fp8")), HasSubstr("'fp8'"));
}

TEST_F(Layout, ThatIsNestedDeeplyOrSaysAKeyTwiceIsRefused) {
  EXPECT_THAT(refused(std::string(100'000, '[')), HasSubstr("nested too deeply"));
  std::string twice = layout_;
  twice.insert(1, "\"model\":\"other\",");
  EXPECT_THAT(refused(twice), HasSubstr("twice"));
}

/// A layout of two pieces: a run, and a box.
class Pieces : public ::testing::Test {
 protected:
  static ModelSpec model() {
    ModelSpec model{.name = "m", .units = {}};
    model.units.push_back({.name = "a", .params = {{.name = "a", .shape = {50}}}});
    model.units.push_back({.name = "b", .params = {{.name = "b", .shape = {2, 3}}}});
    model.units[0].params[0].whole =
        WholePlace{.name = "a", .shape = {10, 10}, .first = 50, .offsets = {}, .box = {}};
    model.units[1].params[0].whole = WholePlace{
        .name = "whole b", .shape = {4, 3}, .first = 0, .offsets = {2, 0}, .box = {2, 3}};
    return model;
  }
  static std::string refused(const std::string& layout) {
    return refusal([&] { static_cast<void>(places_in(layout, model())); });
  }
  const std::string layout_ = layout_of_pieces(ChunkTable(model(), 1).layout(), model());
};

TEST_F(Pieces, AreTakenAsTheyAreWritten) {
  EXPECT_EQ(places_in(layout_, model()), places_of(model()));
  EXPECT_EQ(places_in(layout_of_pieces(ChunkTable(model(), 1).layout()), model()), std::nullopt);
  ModelSpec none = model();
  none.units[0].params[0].whole = WholePlace{};
  const std::string layout = layout_of_pieces(ChunkTable(none, 1).layout(), none);
  EXPECT_EQ(places_in(layout, none), places_of(none));
  EXPECT_EQ(ChunkTable::from_layout(none, layout).layout(), ChunkTable(none, 1).layout());
}

TEST_F(Pieces, ThatLieWhereNoneCanAreRefused) {
  const std::int64_t giant = std::int64_t{1} << 40;
  for (const json& shape : {json{giant, giant}, json{0, 10}, json{-1}, json("x"), json(nullptr)})
    EXPECT_NE(refused(with(layout_, "/pieces/0/shape", shape)), "taken") << shape;
  for (const json& first : {json(51), json(-1), json(UINT64_MAX), json("0"), json(1.5)})
    EXPECT_NE(refused(with(layout_, "/pieces/0/first", first)), "taken") << first;
  for (const json& offsets : {json{3, 0}, json{2}, json{2, 1}, json{-1, 0}, json{UINT64_MAX, 0}})
    EXPECT_NE(refused(with(layout_, "/pieces/1/offsets", offsets)), "taken") << offsets;
  for (const json& box : {json{2, 2}, json{6}, json::array(), json{giant, giant}, json{0, 3}})
    EXPECT_NE(refused(with(layout_, "/pieces/1/box", box)), "taken") << box;
  EXPECT_NE(refused(with(layout_, "/pieces/1/name", "")), "taken");
  EXPECT_NE(refused(with(layout_, "/pieces/1", json::array())), "taken");
  EXPECT_THAT(refused(with(layout_, "/pieces", json::array())), HasSubstr("0 places"));
  EXPECT_EQ(refused(with(layout_, "/pieces/0", nullptr)), "taken");
  EXPECT_EQ(refused(with(layout_, "/pieces", true)), "taken");
}

class StoreText : public ::testing::Test {
 protected:
  static std::string text() {
    StoreSpec spec;
    spec.record_bytes = {kTileBytes, 2 * kTileBytes};
    return store_text(spec);
  }
  static std::string refused(const std::string& text) {
    return refusal([&] { static_cast<void>(parse_store_text(text, "/drive/file")); });
  }
};

TEST_F(StoreText, IsTakenAsItIsWritten) { EXPECT_EQ(refused(text()), "taken"); }

TEST_F(StoreText, WithNumbersThatMakeNoSenseIsRefusedByFileAndField) {
  for (const json& value : {json(-1), json("2"), json(4'294'967'298), json(2.0)})
    EXPECT_THAT(refused(with(text(), "/slots", value)),
                ::testing::AllOf(HasSubstr("/drive/file"), HasSubstr("slots")));
  for (const json& value : {json(-1), json(UINT64_MAX), json("x"), json(nullptr)})
    EXPECT_THAT(refused(with(text(), "/record_bytes/1", value)), HasSubstr("record_bytes"));
  EXPECT_THAT(refused(with(text(), "/chunks", {0, 4'294'967'296})), HasSubstr("chunks"));
  EXPECT_THAT(refused(with(text(), "/constant", {true, 1})), HasSubstr("constant"));
  EXPECT_THAT(refused(with(text(), "/record_segments", json::array({{"a", 3}}))),
              HasSubstr("/drive/file"));
}

TEST_F(StoreText, ThatIsNestedDeeplyOrSaysAKeyTwiceIsRefused) {
  EXPECT_THAT(refused("{\"layout\":" + std::string(100'000, '[')), HasSubstr("nested too deeply"));
  std::string twice = text();
  twice.insert(1, "\"slots\":1,");
  EXPECT_THAT(refused(twice), HasSubstr("twice"));
}

TEST_F(StoreText, WhoseFileWouldBeLongerThanAnyIsRefused) {
  StoreSpec spec;
  spec.record_bytes.assign(5, (std::uint64_t{1} << 59) / kTileBytes * kTileBytes);
  EXPECT_THROW(static_cast<void>(StoreLayout::of(spec, 100)), Error) << "the sum would wrap";
  spec.record_bytes = {kTileBytes};
  spec.blob_capacity_bytes = UINT64_MAX;
  EXPECT_THROW(static_cast<void>(StoreLayout::of(spec, 100)), Error);
}

}  // namespace hostile_layout_test
}  // namespace ziggurat
