// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_quantized_test.cc: whole parameters that come in int8 for a forward or backward:
// what travels, and that who reads or writes them has them as they are. lent_wholes_test.cc has
// their values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>

#include "tests/core/wholes_world.h"

namespace ziggurat::testing {
namespace lent_quantized_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

/// What the other ranks give a rank that brings a unit once.
std::uint64_t bytes_of_others(const WholesWorld& world, const WholesRank& rank, StreamedUnit unit,
                              bool aside) {
  std::uint64_t bytes = 0;
  for (const std::unique_ptr<WholesRank>& other : world.ranks) {
    for (std::size_t w = 0; w < kWholes.size(); ++w) {
      if (kWholes[w].unit != unit || other->number == rank.number) continue;
      const std::uint64_t count = other->cuts[w].count;
      bytes += rank.is_quantized(w) && !aside ? quantized_bytes(QuantizedBits::k8, count)
                                              : count * size_bytes(kWholes[w].dtype);
    }
  }
  return bytes;
}

TEST(LentQuantized, TakesTheBytesOfTheirCodesAndAsideThoseOfTheParameters) {
  WholesWorld world(3, Tier::kHost);
  world.quantize_params();
  std::barrier<> all(3);
  expect_none(world.run([&](WholesRank& rank) {
    std::uint64_t expected = bytes_of_others(world, rank, 4, true);
    rank.look(4);  // not quantized: it stays
    for (const bool aside : {false, true, false}) {
      for (StreamedUnit u = 0; u < 4; ++u) {
        rank.look(u, aside);
        expected += bytes_of_others(world, rank, u, aside);
        EXPECT_EQ(rank.engine->from_ranks().bytes, expected) << "unit " << u << ", " << aside;
        rank.look(u, aside);  // which is there
        EXPECT_EQ(rank.engine->from_ranks().bytes, expected) << "unit " << u << ", " << aside;
      }
    }
    all.arrive_and_wait();
  }));
  const std::uint64_t exact = bytes_of_others(world, *world.ranks[0], 1, true);
  EXPECT_LT(bytes_of_others(world, *world.ranks[0], 1, false), exact * 0.26) << "of fp32";
}

// A node's rank keeps codes, and what is read aside comes from its owner.
TEST(LentQuantized, ComesToANodeOnceInCodes) {
  std::uint64_t codes = 0;
  std::uint64_t exact = 0;
  WholesWorld world(4, Tier::kHost, kTight);  // so that no unit stays
  world.change = [](int, EngineConfig& config, ModelSpec&) { config.strategy.hpz = 2; };
  world.quantize_params();
  for (const bool aside : {false, true}) {
    for (StreamedUnit u = 0; u < kWholeUnits; ++u) {
      const std::uint64_t once = [&] {
        std::uint64_t bytes = 0;
        for (const int node : {0, 2})  // to one rank of the other node each
          for (const int rank : {node, node + 1})
            for (std::size_t w = 0; w < kWholes.size(); ++w) {
              const WholesRank& its = *world.ranks[static_cast<std::size_t>(rank)];
              if (kWholes[w].unit != u) continue;
              bytes += its.is_quantized(w) && !aside
                           ? quantized_bytes(QuantizedBits::k8, its.cuts[w].count)
                           : its.cuts[w].count * size_bytes(kWholes[w].dtype);
            }
        return bytes;
      }();
      (aside ? exact : codes) += once;
    }
  }
  std::vector<std::uint64_t> came(4);
  std::vector<std::uint64_t> aside(4);
  std::barrier<> all(4);
  expect_none(world.run([&](WholesRank& rank) {
    for (int n = 0; n < 3; ++n) rank.look_at_all();
    const auto number = static_cast<std::size_t>(rank.number);
    came[number] = rank.engine->from_ranks().other_nodes_bytes;
    all.arrive_and_wait();
    for (StreamedUnit u = 0; u < 4; ++u) rank.look(u, true);  // unit 4 is not quantized
    aside[number] = rank.engine->from_ranks().other_nodes_bytes - came[number];
    all.arrive_and_wait();
  }));
  EXPECT_EQ(came[0] + came[1] + came[2] + came[3], codes);
  std::uint64_t of_unit_4 = 0;
  for (std::size_t w = 0; w < kWholes.size(); ++w)
    if (kWholes[w].unit == 4) of_unit_4 += kWholes[w].count * size_bytes(kWholes[w].dtype);
  EXPECT_EQ(aside[0] + aside[1] + aside[2] + aside[3], 2 * (exact - of_unit_4))
      << "each of the two ranks of a node asks the owner";
}

TEST(LentQuantized, RefusesToWriteRoundedValuesHome) {
  WholesWorld world(2, Tier::kHost);
  world.quantize_params();
  std::barrier<> both(2);
  expect_none(world.run([&](WholesRank& rank) {
    LentEngine& engine = *rank.engine;
    engine.acquire(0, rank.host);
    EXPECT_THAT(thrown_by([&] { engine.store_param(rank.whole(3), rank.host); }).what(),
                AllOf(HasSubstr("store_param(unit 0)"), HasSubstr("rounded to int8"),
                      HasSubstr("acquire it aside")));
    EXPECT_THAT(thrown_by([&] { engine.acquire_aside(0, rank.host); }).what(),
                AllOf(HasSubstr("acquire_aside(unit 0)"), HasSubstr("release it before")));
    EXPECT_TRUE(rank.is_right(0));
    engine.release(0, rank.host);
    rank.look(0, true);
    both.arrive_and_wait();
    rank.step();
    for (const bool aside : {false, true})
      for (StreamedUnit u = 0; u < kWholeUnits; ++u) rank.look(u, aside);
    both.arrive_and_wait();
  }));
}

// While a unit is there as it is, a forward finds it so; the next one has it rounded again.
TEST(LentQuantized, IsExactForAllWhileSomebodyHasItAside) {
  WholesWorld world(2, Tier::kNvme);
  world.quantize_params();
  std::barrier<> both(2);
  expect_none(world.run([&](WholesRank& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.look_at_all();
      rank.engine->acquire_aside(0, rank.host);
      rank.engine->acquire(0, rank.host);
      EXPECT_TRUE(rank.is_right(0, true));
      rank.engine->release(0, rank.host);
      EXPECT_TRUE(rank.is_right(0, true));
      rank.engine->release(0, rank.host);
      rank.look(0);
      both.arrive_and_wait();
      rank.step();
    }
  }));
}

TEST(LentQuantized, SaysHowLargeTheErrorsAre) {
  for (const bool quantized : {false, true}) {
    WholesWorld world(2, Tier::kHost);
    if (quantized) world.quantize_params();
    expect_none(world.run([&](WholesRank& rank) {
      const auto says =
          Contains(HasSubstr("parameters travel between ranks in 8 bits: each value is within "
                             "0.40 % of the largest in its block of 256"));
      if (quantized) {
        EXPECT_THAT(rank.engine->description(), says);
      } else {
        EXPECT_THAT(rank.engine->description(), Not(says));
      }
    }));
  }
}

}  // namespace lent_quantized_test
}  // namespace ziggurat::testing
