// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_lies_test.cc: drives that lose and misdirect writes they have acknowledged,
// flip bits and forget sectors, under jobs that are cut off at any event, recovery included. An
// oracle that looks into every slot says what is left: that, and nothing else, is what the store
// opens; where nothing is left, it refuses and changes nothing. 500 seeds; ZIGGURAT_SEEDS=10000 is
// the whole campaign. Each failure prints its seed: ZIGGURAT_SEED=n runs that one alone.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iterator>
#include <optional>
#include <random>

#include "base/checksum.h"
#include "tests/faults/crash_world.h"

namespace ziggurat::faults {
namespace {

using Start = Launch::Start;

constexpr std::uint64_t kSeeds = 500;
constexpr std::uint64_t kSectorBytes = 512;

std::optional<std::uint64_t> number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  return std::strtoull(text, nullptr, 10);
}

bool one_in(std::mt19937_64& random, std::uint64_t n) { return random() % n == 0; }

/// In each life, drives that are honest, err now and then, or hardly ever do not: each of them by
/// itself, or all at the same writes, as those that share a faulty controller.
std::function<WriteFate(std::uint64_t, std::uint64_t)> draw_fates(std::mt19937_64& random) {
  constexpr std::uint64_t kNever = 0;
  constexpr std::uint64_t kOneIn[] = {kNever, kNever, kNever, 100, 30, 6};
  const std::uint64_t lost = kOneIn[random() % std::size(kOneIn)];
  const std::uint64_t misdirected = kOneIn[random() % std::size(kOneIn)];
  const bool alike = one_in(random, 4);
  const std::uint64_t seed = random();
  if (lost == kNever && misdirected == kNever) return {};
  return [=](std::uint64_t drive, std::uint64_t index) {
    std::uint64_t drawn = mix_seed(mix_seed(seed, alike ? 0 : drive), index);
    if (lost != kNever && drawn % lost == 0) return WriteFate::kLost;
    drawn = mix_seed(drawn, 1);
    if (misdirected != kNever && drawn % misdirected == 0) return WriteFate::kMisdirected;
    return WriteFate::kWritten;
  };
}

/// A few sectors rot or cannot be read any more.
void age(CrashWorld& world, const std::string& path, std::mt19937_64& random) {
  const PagedBytes& bytes = world.disk().contents(path);
  for (std::uint64_t i = random() % 3; i > 0; --i) {
    const std::uint64_t at = random() % (bytes.size() / kSectorBytes) * kSectorBytes;
    if (one_in(random, 2)) {
      world.disk().make_unreadable(path, at, kSectorBytes);
    } else {
      std::byte flipped{};
      bytes.read(at, {&flipped, 1});
      flipped ^= std::byte{1};
      world.disk().overwrite(path, at, {&flipped, 1});
    }
  }
}

struct Outcomes {
  int newest = 0;     ///< opened at the generation that was last reported durable, or the one after
  int older = 0;      ///< opened at an older one, and every rank said which was lost
  int traceless = 0;  ///< likewise, but the drives had lost every superblock that spoke of it
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
    return;
  }
  if (back.resumed_at >= promised) {
    ++outcomes.newest;
  } else {
    ++(world.provable().heard_of > back.resumed_at ? outcomes.older : outcomes.traceless);
  }
  const LaunchResult again = world.launch({.start = Start::kResume, .steps = 0, .seed = 1});
  ASSERT_EQ(world.fault(), "") << "seed " << seed << story;
  ASSERT_EQ(again.resumed_at, back.resumed_at + 1) << "seed " << seed << story;
}

struct Shape {
  const char* name;
  int ranks;
  int stripes;
  double share;  ///< of all seeds
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
  if (const auto one = number_in("ZIGGURAT_SEED"))
    return live_on_bad_drives(before, options, events, *one, outcomes);
  const double all = static_cast<double>(number_in("ZIGGURAT_SEEDS").value_or(kSeeds));
  const auto seeds = static_cast<std::uint64_t>(all * shape.share);
  for (std::uint64_t seed = 0; seed < seeds && !HasFatalFailure(); ++seed)
    live_on_bad_drives(before, options, events, seed, outcomes);
  fmt::print(
      "  {} seeds: {} at the newest, {} at an older one that says what was lost, {} at one "
      "that cannot know of a newer, {} refused\n",
      seeds, outcomes.newest, outcomes.older, outcomes.traceless, outcomes.refused);
  // The schedules reach what they are meant to reach.
  const int few = static_cast<int>(seeds / 100);
  EXPECT_GT(outcomes.newest, few);
  EXPECT_GT(outcomes.older, few);
  EXPECT_GT(outcomes.refused, few);
}

INSTANTIATE_TEST_SUITE_P(Shapes, StoreLies,
                         testing::Values(Shape{"OneRank", 1, 1, 0.4}, Shape{"TwoRanks", 2, 1, 0.2},
                                         Shape{"ThreeStripes", 1, 3, 0.2},
                                         Shape{"TwoRanksOfThreeStripes", 2, 3, 0.2}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace ziggurat::faults
