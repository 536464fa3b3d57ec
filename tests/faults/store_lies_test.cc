// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_lies_test.cc: drives that lose and misdirect writes they have acknowledged,
// flip bits and forget sectors, under jobs that are cut off at any event, recovery included. An
// oracle that looks into every slot says what is left: that, and nothing else, is what the store
// opens; where nothing is left, it refuses and changes nothing. 10,000 seeds; each failure prints
// its own. ZIGGURAT_SEEDS multiplies them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "tests/faults/crash_world.h"

namespace ziggurat::faults {
namespace {

using Start = Launch::Start;

constexpr std::uint64_t kSectorBytes = 512;

std::uint64_t seed_factor() {
  const char* text = std::getenv("ZIGGURAT_SEEDS");
  return text == nullptr ? 1 : std::max<std::uint64_t>(1, std::strtoull(text, nullptr, 10));
}

bool one_in(std::mt19937_64& random, std::uint64_t n) { return n != 0 && random() % n == 0; }

/// Of each life: an honest drive, one that errs now and then, or one that hardly ever does not.
std::function<WriteFate(std::uint64_t)> draw_fates(std::mt19937_64& random) {
  constexpr std::uint64_t kOneIn[] = {0, 0, 40, 12, 4};
  const std::uint64_t lost = kOneIn[random() % 5];
  const std::uint64_t misdirected = kOneIn[random() % 5];
  if (lost == 0 && misdirected == 0) return {};
  return [lost, misdirected, own = std::mt19937_64(random())](std::uint64_t) mutable {
    if (one_in(own, lost)) return WriteFate::kLost;
    return one_in(own, misdirected) ? WriteFate::kMisdirected : WriteFate::kWritten;
  };
}

/// A few sectors rot or cannot be read any more.
void age(CrashWorld& world, const std::string& path, std::mt19937_64& random) {
  const auto bytes = world.disk().contents(path);
  for (std::uint64_t i = random() % 3; i > 0; --i) {
    const std::uint64_t at = random() % (bytes.size() / kSectorBytes) * kSectorBytes;
    if (one_in(random, 2)) {
      world.disk().make_unreadable(path, at, kSectorBytes);
    } else {
      const std::vector<std::byte> flipped{bytes[at] ^ std::byte{1}};
      world.disk().overwrite(path, at, flipped);
    }
  }
}

struct Outcomes {
  int newest = 0;  ///< the generation that was last reported durable, or the one after
  int older = 0;
  int refused = 0;
};

/// Up to three lives on a bad drive, then a look at what is left, on a drive that is honest again.
void live_on_bad_drives(const CrashWorld& before, const WorldOptions& options, std::uint64_t events,
                        std::uint64_t seed, Outcomes& outcomes) {
  CrashWorld world = before;
  std::mt19937_64 random(seed);
  std::string story;
  const std::uint64_t lives = 1 + random() % 3;
  for (std::uint64_t life = 0; life < lives; ++life) {
    Launch launch{.start = Start::kResume, .steps = 2, .seed = random()};
    launch.write_fate = draw_fates(random);
    launch.speculates = one_in(random, 4);
    if (!one_in(random, 3)) launch.power_cut_after = 1 + random() % events;
    const LaunchResult result = world.launch(launch);
    const bool power = one_in(random, 2);
    if (power) {
      world.disk().crash(random());
    } else {
      world.disk().kill(random());
    }
    if (one_in(random, 3)) {
      world.disk().crash(random());  // so that all that is there is durable, and can be damaged
      for (int rank = 0; rank < options.ranks; ++rank) {
        for (int stripe = 0; stripe < options.stripes; ++stripe)
          age(world, world.path(rank, static_cast<std::uint32_t>(stripe)), random);
      }
    }
    story +=
        fmt::format("\n  life {}: {}, {}", life, power ? "power cut" : "killed", describe(result));
    ASSERT_EQ(world.fault(), "") << "seed " << seed << story;
  }
  const std::uint64_t promised = world.promised().value_or(0);
  const LaunchResult back = world.launch({.start = Start::kResume, .steps = 1, .seed = random()});
  ASSERT_EQ(world.fault(), "") << "seed " << seed << story;
  if (back.error) {
    ++outcomes.refused;
  } else {
    ++(back.resumed_at < promised ? outcomes.older : outcomes.newest);
    const LaunchResult again = world.launch({.start = Start::kResume, .steps = 0, .seed = 1});
    ASSERT_EQ(world.fault(), "") << "seed " << seed << story;
    ASSERT_EQ(again.resumed_at, back.resumed_at + 1) << "seed " << seed << story;
  }
}

struct Shape {
  const char* name;
  int ranks;
  int stripes;
  std::uint64_t seeds;
};

class StoreLies : public testing::TestWithParam<Shape> {};

TEST_P(StoreLies, OpensWhateverCanBeProvenAndNothingElse) {
  const Shape& shape = GetParam();
  const WorldOptions options{.ranks = shape.ranks,
                             .stripes = shape.stripes,
                             .record_bytes = {64 * 1024, 64 * 1024, 64 * 1024},
                             .lying_drives = true};
  CrashWorld before(options);
  ASSERT_EQ(describe(before.launch({.start = Start::kCreate, .steps = 2})), "finished");
  CrashWorld counted = before;
  const std::uint64_t events = counted.launch({.start = Start::kResume, .steps = 2}).events;
  Outcomes outcomes;
  const std::uint64_t seeds = shape.seeds * seed_factor();
  for (std::uint64_t seed = 0; seed < seeds && !HasFatalFailure(); ++seed)
    live_on_bad_drives(before, options, events, seed, outcomes);
  fmt::print("  {} seeds: {} at the newest, {} at an older one, {} refused\n", seeds,
             outcomes.newest, outcomes.older, outcomes.refused);
  // The schedules reach what they are meant to reach.
  const int few = static_cast<int>(seeds / 50);
  EXPECT_GT(outcomes.newest, few);
  EXPECT_GT(outcomes.older, few);
  EXPECT_GT(outcomes.refused, few);
}

INSTANTIATE_TEST_SUITE_P(Shapes, StoreLies,
                         testing::Values(Shape{"OneRank", 1, 1, 5000},
                                         Shape{"TwoRanks", 2, 1, 2500},
                                         Shape{"ThreeStripes", 1, 3, 1700},
                                         Shape{"TwoRanksOfThreeStripes", 2, 3, 800}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace ziggurat::faults
