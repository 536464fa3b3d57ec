// SPDX-License-Identifier: Apache-2.0
// tests/tiers/record_format_test.cc: where segments lie, and that a record's hash covers every
// piece once, in any order of reading.
#include "tiers/store/record_format.h"

#include <gmock/gmock.h>

#include <vector>

#include "base/error.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace record_format_test {

using ::testing::HasSubstr;

RecordFormat eight_bit_like() {
  return RecordFormat({{"master", 65536}, {"codes", 16384}, {"more", 16384}, {"scales", 256}});
}

TEST(RecordFormat, LaysSegmentsOneAfterTheOtherAndPadsToTiles) {
  const RecordFormat format = eight_bit_like();
  EXPECT_EQ(format.tile_bytes(), 98560u);
  EXPECT_EQ(format.offset(0, 3), 0u);
  EXPECT_EQ(format.offset(1, 3), 3 * 65536u);
  EXPECT_EQ(format.offset(2, 3), 3 * 81920u);
  EXPECT_EQ(format.offset(3, 3), 3 * 98304u);
  EXPECT_EQ(format.record_bytes(3), 5 * kTileBytes);  // 295,680 bytes, padded
  for (std::uint64_t tiles = 1; tiles < 200; ++tiles)
    ASSERT_EQ(format.tiles(format.record_bytes(tiles)), tiles);
  EXPECT_EQ(format.text(), "master, codes, more, scales");
}

TEST(RecordFormat, RefusesPiecesThatWouldStraddleATile) {
  const auto refusal = [](std::vector<RecordFormat::Segment> segments) {
    try {
      RecordFormat format(std::move(segments));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal({{"small", 256}, {"large", 65536}}), HasSubstr("'large'"));
  EXPECT_THAT(refusal({{"odd", 3 * 16384}}), HasSubstr("'odd'"));
  EXPECT_THAT(refusal({{"none", 65536}, {"empty", 0}}), HasSubstr("'empty'"));
  EXPECT_THAT(refusal({{"little", 4096}}), HasSubstr("at least"));
}

TEST(RecordHash, OfThreeFp32ArraysIsThatOfTheirBytes) {
  std::vector<std::byte> record(6 * kTileBytes);
  for (std::size_t i = 0; i < record.size(); ++i) record[i] = static_cast<std::byte>(i / 777);
  const RecordFormat named({{"a", kTileBytes}, {"b", kTileBytes}, {"c", kTileBytes}});
  EXPECT_EQ(record_hash(record, 9, named), record_hash(record, 9));
}

TEST(RecordHash, MayBeTakenInAnyMultiplesOfATileAndSeesEveryPieceButNotThePadding) {
  const RecordFormat format = eight_bit_like();
  constexpr std::uint64_t kTiles = 5;
  std::vector<std::byte> record(format.record_bytes(kTiles));
  for (std::size_t i = 0; i < record.size(); ++i) record[i] = static_cast<std::byte>(i / 255);
  const std::uint64_t want = record_hash(record, 9, format);
  for (const std::size_t step : {1u, 2u, 3u}) {
    RecordHash hash(format, record.size());
    for (std::size_t at = 0; at < record.size(); at += step * kTileBytes)
      hash.add(at, std::span(record).subspan(at, std::min(step * kTileBytes, record.size() - at)));
    EXPECT_EQ(hash.finish(9), want) << step;
  }
  const std::uint64_t end = format.tile_bytes() * kTiles;
  for (std::uint64_t at = 0; at < record.size(); at += 4093) {
    record[at] ^= std::byte{1};
    EXPECT_EQ(record_hash(record, 9, format) == want, at >= end) << at;
    record[at] ^= std::byte{1};
  }
}

}  // namespace record_format_test
}  // namespace ziggurat
