// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/order_test.cc: clocks, and the history of accesses by intervals.
#include "tests/cuda_double/order.h"

#include <gmock/gmock.h>

#include <random>
#include <string>
#include <vector>

namespace ziggurat::cuda_double {
namespace {

TEST(Order, clocks_merge_to_the_later_of_each) {
  Clock a;
  Clock b;
  a.set(1, 5);
  a.set(2, 1);
  b.set(2, 7);
  b.set(4, 2);
  a.merge(b);
  EXPECT_EQ(a.of(0), 0u);
  EXPECT_EQ(a.of(1), 5u);
  EXPECT_EQ(a.of(2), 7u);
  EXPECT_EQ(a.of(4), 2u);
  EXPECT_EQ(a.of(9), 0u);
}

class History : public testing::Test {
 protected:
  bool races(Actor actor, Range range, bool writes,
             std::vector<std::pair<Actor, std::uint64_t>> knew) {
    Clock clock;
    for (const auto& [who, tick] : knew) clock.set(who, tick);
    clock.set(actor, ++ticks_[actor]);
    return history_.add({range, writes}, {actor, ticks_[actor], clock, "an act"}).has_value();
  }
  AccessHistory history_;
  std::uint64_t ticks_[8] = {};
};

TEST_F(History, reads_do_not_race_and_a_write_races_with_each_of_them) {
  EXPECT_FALSE(races(1, {0, 100}, false, {}));
  EXPECT_FALSE(races(2, {50, 150}, false, {}));
  EXPECT_TRUE(races(3, {60, 61}, true, {{1, 1}})) << "knows one of the readers";
  EXPECT_FALSE(races(4, {20, 40}, true, {{1, 1}})) << "only that one read there";
  EXPECT_FALSE(races(5, {110, 120}, true, {{2, 1}}));
}

TEST_F(History, an_edge_is_exact) {
  EXPECT_FALSE(races(1, {100, 200}, true, {}));
  EXPECT_FALSE(races(2, {200, 300}, true, {}));
  EXPECT_FALSE(races(3, {0, 100}, true, {}));
  EXPECT_TRUE(races(4, {199, 200}, false, {{2, 1}, {3, 1}}));
  EXPECT_FALSE(races(4, {200, 201}, false, {{2, 1}}));
}

TEST_F(History, forgotten_bytes_have_no_past) {
  EXPECT_FALSE(races(1, {0, 100}, true, {}));
  history_.forget({10, 20});
  EXPECT_FALSE(races(2, {10, 20}, true, {}));
  EXPECT_TRUE(races(3, {5, 20}, false, {{2, 1}}));
}

/// The same by bytes, one after the other.
TEST_F(History, intervals_say_what_bytes_would) {
  struct Byte {
    Actor writer = 0;
    std::uint64_t write = 0;
    std::uint64_t reads[4] = {};
  };
  std::mt19937 random(7);
  std::vector<Byte> bytes(64);
  Clock knows[4];
  std::uint64_t ticks[4] = {};
  for (int round = 0; round < 3000; ++round) {
    const Actor actor = random() % 4;
    if (random() % 3 == 0) knows[actor].merge(knows[random() % 4]);
    const std::uintptr_t begin = random() % 64;
    const std::uintptr_t end = std::min<std::uintptr_t>(64, begin + 1 + random() % 16);
    const bool writes = random() % 2 == 0;
    knows[actor].set(actor, ++ticks[actor]);
    bool expected = false;
    for (std::uintptr_t at = begin; at < end; ++at) {
      Byte& byte = bytes[at];
      expected |= byte.write > 0 && knows[actor].of(byte.writer) < byte.write;
      for (Actor reader = 0; reader < 4; ++reader) {
        expected |= writes && knows[actor].of(reader) < byte.reads[reader];
      }
      if (writes) {
        byte = {actor, ticks[actor], {}};
      } else {
        byte.reads[actor] = ticks[actor];
      }
    }
    const Act act{actor, ticks[actor], knows[actor], "an act"};
    ASSERT_EQ(history_.add({{begin, end}, writes}, act).has_value(), expected) << round;
  }
}

}  // namespace
}  // namespace ziggurat::cuda_double
