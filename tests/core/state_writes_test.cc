// SPDX-License-Identifier: Apache-2.0
// tests/core/state_writes_test.cc: state that a trainer has written: who was given it, to put it
// into a record on a worker, has it as it was, whatever is written meanwhile.
#include "core/schedule/optimizer/state_writes.h"

#include <gtest/gtest.h>

#include "optimizer/state_format.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace state_writes_test {

constexpr StateKind kAdamW{};
constexpr std::size_t kExpAvg = 1;

std::vector<float> all(float value) { return std::vector<float>(kTileElements, value); }

/// A record of a tile, with what was written in it.
std::vector<float> exp_avg_of(const StateWrites::Arrays& arrays) {
  std::vector<std::byte> record(record_format(kAdamW).record_bytes(1));
  StateWrites::apply(kAdamW, arrays, record);
  std::vector<float> values(kTileElements);
  read_state_values(kAdamW, kExpAvg, record, values);
  return values;
}

TEST(StateWrites, AreTheNewestOfEachArray) {
  StateWrites writes;
  EXPECT_EQ(writes.of(3), nullptr);
  writes.put(3, {kExpAvg, 0}, all(1));
  writes.put(3, {0, 0}, all(7));
  writes.put(3, {kExpAvg, 0}, all(2));
  const auto its = writes.of(3);
  EXPECT_TRUE(its->contains({0, 0}));
  EXPECT_EQ(exp_avg_of(*its), all(2));
  writes.forget(3);
  EXPECT_EQ(writes.of(3), nullptr);
}

TEST(StateWrites, StayForWhoWasGivenThem) {
  StateWrites writes;
  writes.put(3, {kExpAvg, 0}, all(1));
  const auto given = writes.of(3);
  writes.put(3, {kExpAvg, 0}, all(2));
  EXPECT_EQ(exp_avg_of(*given), all(1)) << "another was written";
  writes.forget(3);
  EXPECT_EQ(exp_avg_of(*given), all(1)) << "a sweep has put it into the record";
}

}  // namespace state_writes_test
}  // namespace ziggurat
