// SPDX-License-Identifier: Apache-2.0
// tests/core/save_pace_test.cc: a save keeps to its bandwidth, and catches up for a moment when it
// fell behind.
#include "core/engine/state/save_pace.h"

#include <gtest/gtest.h>

namespace ziggurat {
namespace save_pace_test {

using namespace std::chrono_literals;

constexpr std::uint64_t kRate = 1'000'000;  // bytes a second
constexpr std::uint64_t kPiece = 100'000;   // 100 ms

TEST(SavePace, BeginsAPieceWhenTheTimeForThoseBeforeIsOver) {
  SavePace pace(kRate);
  EXPECT_EQ(pace.begin(5s, kPiece), 5s);
  EXPECT_EQ(pace.begin(5s, 2 * kPiece), 5s + 100ms);
  EXPECT_EQ(pace.begin(5s + 250ms, kPiece), 5s + 300ms);
}

TEST(SavePace, CatchesUpWithWhatItFellBehind) {
  SavePace pace(kRate);
  pace.begin(5s, kPiece);
  EXPECT_EQ(pace.begin(5s + 250ms, kPiece), 5s + 250ms);  // 150 ms late
  EXPECT_EQ(pace.begin(5s + 260ms, kPiece), 5s + 260ms);  // 60 ms late
  EXPECT_EQ(pace.begin(5s + 270ms, kPiece), 5s + 300ms);  // as if it had never been late
}

TEST(SavePace, CatchesUpForAMomentOnly) {
  SavePace pace(kRate);
  pace.begin(5s, kPiece);
  std::uint64_t at_once = 0;
  while (pace.begin(1h, kPiece) == 1h) at_once += kPiece;
  EXPECT_EQ(at_once, 300'000U);  // 250 ms, up to a whole piece
}

TEST(SavePace, OfAPieceThatTakesAlmostForEverIsNoOverflow) {
  SavePace pace(1);
  pace.begin(5s, std::uint64_t{1} << 62);
  EXPECT_EQ(pace.begin(6s, 1), 5s + kLongestWait);
}

}  // namespace save_pace_test
}  // namespace ziggurat
