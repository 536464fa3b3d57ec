// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_wholes_test.cc: each rank's engine keeps slices of streamed parameters and brings
// whole units, whatever the other ranks do; they have the bits of plain arrays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <random>
#include <thread>
#include <tuple>

#include "base/memory_exhausted.h"
#include "tests/core/wholes_world.h"

namespace ziggurat::testing {
namespace lent_wholes_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Shape {
  const char* name;
  int ranks;
  int group;  ///< ranks that have all slices
  int hpz = 0;
  bool quantized = false;
};
constexpr Shape kAlone[] = {{"1_rank", 1, 1}, {"2_ranks", 2, 2}, {"3_ranks", 3, 3}};
constexpr Shape kInGroups[] = {{"2_groups_of_2_ranks", 4, 2}, {"2_nodes_of_2_ranks", 4, 4, 2}};
constexpr Shape kQuantized[] = {{"1_rank_quantized", 1, 1, 0, true},
                                {"2_ranks_quantized", 2, 2, 0, true},
                                {"3_ranks_quantized", 3, 3, 0, true},
                                {"2_groups_of_2_ranks_quantized", 4, 2, 0, true},
                                {"2_nodes_of_2_ranks_quantized", 4, 4, 2, true}};

class LentWholes : public ::testing::TestWithParam<std::tuple<Tier, Shape, std::uint64_t>> {
 protected:
  static const Shape& shape() { return std::get<1>(GetParam()); }
  LentWholes()
      : world_(shape().ranks, std::get<0>(GetParam()), std::get<2>(GetParam()), shape().group) {
    world_.change = [](int, EngineConfig& config, ModelSpec&) {
      config.strategy.hpz = shape().hpz;
    };
    if (shape().quantized) world_.quantize_params();
  }
  WholesWorld world_;
};

std::string name_of(const ::testing::TestParamInfo<LentWholes::ParamType>& one) {
  return fmt::format("{}_{}_{}", to_string(std::get<0>(one.param)), std::get<1>(one.param).name,
                     std::get<2>(one.param) == kRoomy ? "roomy" : "tight");
}
INSTANTIATE_TEST_SUITE_P(Worlds, LentWholes,
                         ::testing::Combine(::testing::Values(Tier::kHost, Tier::kNvme),
                                            ::testing::ValuesIn(kAlone),
                                            ::testing::Values(kRoomy, kTight)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Groups, LentWholes,
                         ::testing::Values(std::tuple{Tier::kHost, kInGroups[0], kTight},
                                           std::tuple{Tier::kNvme, kInGroups[0], kRoomy},
                                           std::tuple{Tier::kHost, kInGroups[1], kRoomy},
                                           std::tuple{Tier::kNvme, kInGroups[1], kTight}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Quantized, LentWholes,
                         ::testing::Values(std::tuple{Tier::kHost, kQuantized[0], kRoomy},
                                           std::tuple{Tier::kHost, kQuantized[1], kRoomy},
                                           std::tuple{Tier::kNvme, kQuantized[1], kTight},
                                           std::tuple{Tier::kHost, kQuantized[2], kTight},
                                           std::tuple{Tier::kNvme, kQuantized[2], kRoomy},
                                           std::tuple{Tier::kNvme, kQuantized[3], kRoomy},
                                           std::tuple{Tier::kHost, kQuantized[4], kRoomy},
                                           std::tuple{Tier::kNvme, kQuantized[4], kTight}),
                         name_of);

TEST_P(LentWholes, AreBroughtInTheSameOrderInEachStep) {
  expect_none(world_.run([](WholesRank& rank) {
    rank.look_at_all();
    for (int step = 0; step < 4; ++step) {
      rank.step();
      rank.look_at_all();
    }
  }));
}

/// A rank of its own mind looks at units, and steps with the others.
void train_at_random(WholesRank& rank, unsigned seed, int steps) {
  std::minstd_rand random(seed * 64 + static_cast<unsigned>(rank.number) + 1);
  const auto any = [&] { return static_cast<StreamedUnit>(random() % kWholeUnits); };
  for (int step = 0; step < steps; ++step) {
    for (unsigned n = random() % 6; n > 0; --n) {
      const bool aside = random() % 3 == 0;
      if (random() % 3 == 0) rank.engine->expect_units(std::vector<StreamedUnit>{any(), any()});
      if (random() % 8 == 0) std::this_thread::sleep_for(1ms);
      rank.look(any(), aside);
      if (::testing::Test::HasFailure()) return;
    }
    if (random() % 2 == 0) rank.engine->expect_gradients();
    // What is brought ahead as the step begins is of no use any more.
    rank.engine->expect_units(std::vector<StreamedUnit>{any(), any()});
    rank.step();
    if (random() % 4 == 0) rank.engine->wait_all_updated();
  }
  rank.look_at_all();
}

TEST_P(LentWholes, AreBroughtInAnyOrderOnEachRank) {
  static unsigned seed = 0;
  ++seed;
  expect_none(world_.run([](WholesRank& rank) { train_at_random(rank, seed, 25); }));
}

TEST_P(LentWholes, AreThereWhileTheOthersSleep) {
  std::barrier<> looked(world_.size());
  for (int awake = 0; awake < world_.size(); ++awake) {
    world_.ranks[static_cast<std::size_t>(awake)]->plain = {};
  }
  expect_none(world_.run([&](WholesRank& rank) {
    for (int awake = 0; awake < world_.size(); ++awake) {
      if (rank.number == awake) rank.look_at_all();
      looked.arrive_and_wait();
      rank.step();
      if (rank.number == awake) rank.look_at_all();
      looked.arrive_and_wait();
    }
  }));
}

TEST_P(LentWholes, AreThereWhileTheOthersWaitInAStep) {
  expect_none(world_.run([&](WholesRank& rank) {
    for (int late = 0; late < world_.size(); ++late) {
      if (rank.number == late) {
        std::this_thread::sleep_for(20ms);
        rank.look_at_all();
      }
      rank.step();
    }
    rank.look_at_all();
  }));
}

TEST_P(LentWholes, AreBroughtByThreadsOfARankAtOnce) {
  if (std::get<2>(GetParam()) == kTight) GTEST_SKIP() << "one unit at a time";
  expect_none(world_.run([](WholesRank& rank) {
    for (int step = 0; step < 3; ++step) {
      std::vector<std::thread> threads;
      for (StreamedUnit first = 0; first < 3; ++first) {
        threads.emplace_back([&rank, first] {
          Host host;
          for (StreamedUnit n = 0; n < 2 * kWholeUnits; ++n) {
            const StreamedUnit unit = (first + n) % kWholeUnits;
            rank.engine->acquire(unit, host);
            EXPECT_TRUE(rank.is_right(unit));
            rank.engine->release(unit, host);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      rank.step();
    }
  }));
}

/// The least host memory in which a rank's engine opens.
std::uint64_t smallest_budget(const WholesWorld& world) {
  std::uint64_t most = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    EngineConfig config = world.config(rank);
    config.host_budget_bytes = 4096;
    const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
    WholesRank alone(rank, rank % world.group, world.group);
    try {
      alone.open(config, alone.model(), *runtime, kRoomy);
    } catch (const MemoryExhausted& error) {
      most = std::max(most, error.shortage().smallest_bytes);
    }
    alone.close();
  }
  return most;
}

// Where parameters are on NVMe a rank reads for several others at once, and for itself.
TEST_P(LentWholes, AreBroughtInAsLittleHostMemoryAsThereIs) {
  world_.host_budget_bytes = smallest_budget(world_);
  ASSERT_GT(world_.host_budget_bytes, 0U);
  expect_none(world_.run([](WholesRank& rank) {
    for (int step = 0; step < 3; ++step) {
      for (StreamedUnit n = 0; n < 3 * kWholeUnits; ++n)
        rank.look((n + static_cast<StreamedUnit>(rank.number)) % kWholeUnits);
      rank.step();
    }
  }));
}

/// Other values for a whole parameter.
TypedArray written_values(std::size_t w, float first) {
  TypedArray values(kWholes[w].dtype, kWholes[w].count);
  for (std::size_t i = 0; i < values.count(); ++i)
    values.set(i, first + 0.125F * static_cast<float>(i % 64));
  return values;
}

// Also before the first step, and parameters that are frozen.
TEST_P(LentWholes, AreWrittenByAllRanks) {
  std::barrier<> written(world_.size());
  expect_none(world_.run([&](WholesRank& rank) {
    for (int round = 0; round < 4; ++round) {
      for (std::size_t w = static_cast<std::size_t>(round % 2); w < kWholes.size(); w += 2) {
        written.arrive_and_wait();  // nobody looks at what some have written already
        rank.write(w, written_values(w, static_cast<float>(round)));
        written.arrive_and_wait();
      }
      rank.look_at_all();
      if (round % 2 == 1) rank.step();
      rank.look_at_all();
    }
  }));
}

// While rank 0 writes one unit after the other and brings others ahead, the others have not begun.
TEST_P(LentWholes, AreWrittenByEachRankAtItsOwnTime) {
  std::barrier<> met(world_.size());
  expect_none(world_.run([&](WholesRank& rank) {
    rank.look_at_all();
    rank.step();
    rank.look_at_all();  // and the order is known
    for (int writer = 0; writer < world_.size(); ++writer) {
      if (rank.number == writer) {
        for (std::size_t w = 0; w < kWholes.size(); ++w) rank.write(w, written_values(w, 0.5F));
        rank.engine->expect_units(std::vector<StreamedUnit>{0, 1, 2, 3, 4});
        std::this_thread::sleep_for(20ms);
      }
      met.arrive_and_wait();
    }
    rank.look_at_all();
    rank.step();
    rank.look_at_all();
  }));
}

TEST_P(LentWholes, AreWrittenSliceBySliceAtHome) {
  std::barrier<> met(world_.size());
  expect_none(world_.run([&](WholesRank& rank) {
    for (int round = 0; round < 2; ++round) {
      rank.look_at_all();
      met.arrive_and_wait();
      for (ParamId p = 0; p < rank.own.size(); ++p) {
        const std::size_t w = rank.own[p];
        const TypedArray values = slice(written_values(w, 0.25F), rank.cuts[w]);
        rank.engine->write_home(p, values.span());
        TypedArray read(values.dtype, values.count());
        rank.engine->read_home(p, read.span());
        EXPECT_EQ(read, values) << kWholes[w].name;
      }
      for (std::size_t w = 0; w < kWholes.size(); ++w)
        rank.plain.write(w, written_values(w, 0.25F));
      met.arrive_and_wait();
      rank.look_at_all();
      rank.step();
      for (ParamId p = 0; p < rank.own.size(); ++p) {
        const std::size_t w = rank.own[p];
        TypedArray read(kWholes[w].dtype, rank.cuts[w].count);
        rank.engine->read_home(p, read.span());
        EXPECT_EQ(read, slice(rank.plain.values(w), rank.cuts[w])) << kWholes[w].name;
      }
    }
  }));
}

// A rank that has written in its slice's place alone stores it as a slice.
TEST_P(LentWholes, AreWrittenInThePlaceOfASlice) {
  std::barrier<> met(world_.size());
  expect_none(world_.run([&](WholesRank& rank) {
    for (ParamId p = 0; p < rank.own.size(); ++p) {
      const std::size_t w = rank.own[p];
      const TypedArray values = written_values(w, 0.75F);
      rank.engine->acquire_aside(kWholes[w].unit, rank.host);
      std::ranges::copy(values.bytes, rank.place(rank.whole(w)).begin());
      rank.engine->store_param(p, rank.host);
      rank.engine->release(kWholes[w].unit, rank.host);
    }
    for (std::size_t w = 0; w < kWholes.size(); ++w) rank.plain.write(w, written_values(w, 0.75F));
    met.arrive_and_wait();
    rank.step();
    rank.look_at_all();
  }));
}

TEST_P(LentWholes, AreThoseOfTheStoreThatIsOpenedAgain) {
  if (std::get<0>(GetParam()) == Tier::kHost) GTEST_SKIP() << "there is no store";
  expect_none(world_.run([](WholesRank& rank) {
    rank.step();
    rank.step();
    rank.engine->make_durable();
  }));
  expect_none(world_.run([](WholesRank& rank) {
    EXPECT_EQ(rank.engine->generation(), 2U);
    rank.look_at_all();
    rank.step();
    rank.look_at_all();
  }));
}

// With hpZ each slice of another node comes to a node once, however often its ranks need it.
TEST(LentWholesOfNodes, ComeToANodeOnceInAGeneration) {
  std::uint64_t all_bytes = 0;
  for (const Whole& its : kWholes) all_bytes += its.count * size_bytes(its.dtype);
  for (const int hpz : {0, 2}) {
    WholesWorld world(4, Tier::kHost, kTight);  // so that no unit stays
    world.change = [&](int, EngineConfig& config, ModelSpec&) { config.strategy.hpz = hpz; };
    std::vector<FromRanks> came(4);
    expect_none(world.run([&](WholesRank& rank) {
      for (int n = 0; n < 3; ++n) rank.look_at_all();
      came[static_cast<std::size_t>(rank.number)] = rank.engine->from_ranks();
    }));
    FromRanks together;
    for (const FromRanks& its : came) {
      together.bytes += its.bytes;
      together.other_nodes_bytes += its.other_nodes_bytes;
    }
    // Each brings what the others have three times, but for units that happen to stay.
    EXPECT_GT(together.bytes, 3 * all_bytes);
    EXPECT_EQ(together.other_nodes_bytes, hpz == 0 ? 0 : all_bytes);
  }
}

// Rank 3 keeps copies of rank 1's slices, for which rank 2 asks it.
TEST(LentWholesOfNodes, NameTheRankThatHasClosedItsEngine) {
  for (const int closes : {1, 3}) {
    WholesWorld world(4, Tier::kHost);
    world.change = [](int, EngineConfig& config, ModelSpec&) { config.strategy.hpz = 2; };
    world.connect();
    std::barrier<> all(4);
    expect_none(run_ranks(4, [&](int number) {
      world.open(number);
      WholesRank& rank = *world.ranks[static_cast<std::size_t>(number)];
      all.arrive_and_wait();
      if (number == closes) rank.close();
      all.arrive_and_wait();
      if (number == 2) {
        const Error error = thrown_by([&] { rank.engine->acquire(0, rank.host); });
        EXPECT_THAT(error.what(), HasSubstr(fmt::format("rank {} has closed its engine", closes)));
      }
      all.arrive_and_wait();
      if (number != closes) rank.close();
    }));
  }
}

TEST(LentWholesOfNodes, AreRefusedUnlessTheyDivideTheRanks) {
  for (const int hpz : {1, 3, 4}) {
    WholesWorld world(4, Tier::kHost);
    world.change = [&](int, EngineConfig& config, ModelSpec&) { config.strategy.hpz = hpz; };
    for (const std::exception_ptr& error : world.run([](WholesRank&) {}))
      EXPECT_THAT(error_in(error).what(),
                  HasSubstr(fmt::format("`hpz={}` does not divide the 4 ranks", hpz)));
  }
}

}  // namespace lent_wholes_test
}  // namespace ziggurat::testing
