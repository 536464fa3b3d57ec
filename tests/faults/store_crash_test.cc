// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_crash_test.cc: whatever instant a job dies at, the store comes back at the
// last generation that every rank had reported durable, or the one after, whole, on every rank,
// from one history. 12,000 seeds in all; each failure prints its own.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "tests/faults/crash_world.h"
#include "tests/support/sanitized.h"

namespace ziggurat::faults {
namespace {

using Start = Launch::Start;

/// A world whose store was made and has finished `steps` steps.
CrashWorld trained(const WorldOptions& options, int steps) {
  CrashWorld world(options);
  const LaunchResult made = world.launch({.start = Start::kCreate, .steps = steps});
  EXPECT_EQ(describe(made), "finished");
  return world;
}

/// Events that `launch` takes if nothing happens to it.
std::uint64_t events_of(CrashWorld world, const Launch& launch) {
  const LaunchResult result = world.launch(launch);
  EXPECT_EQ(describe(result), "finished");
  return result.events;
}

TEST(StoreCrash, PowerCutAtEveryEventOfTwoStepsComesBackWhole) {
  const CrashWorld before = trained({}, 1);
  const std::uint64_t events = events_of(before, {.start = Start::kResume, .steps = 2});
  std::map<std::uint64_t, unsigned> resumed_at;
  for (std::uint64_t seed = 0; seed < campaign_cases(5000); ++seed) {
    CrashWorld world = before;
    world.launch({.start = Start::kResume,
                  .steps = 2,
                  .seed = seed,
                  .power_cut_after = 1 + seed % (events + 1)});
    world.disk().crash(seed);
    const LaunchResult back = world.launch({.start = Start::kResume, .steps = 1, .seed = seed + 1});
    ASSERT_EQ(world.fault(), "") << "seed " << seed;
    ASSERT_EQ(describe(back), "finished") << "seed " << seed;
    ++resumed_at[back.resumed_at];
  }
  // The schedules reach what they are meant to reach.
  for (const std::uint64_t generation : {1, 2, 3})
    EXPECT_GT(resumed_at[generation], campaign_cases(100)) << "generation " << generation;
  EXPECT_EQ(resumed_at.size(), 3u);
}

/// Lives one after the other, each cut off somewhere, recovery included, by power or by a signal,
/// each writing other bytes than the one before would have; then one that nothing happens to.
void live_and_die(const CrashWorld& before, std::uint64_t events, std::uint64_t seed,
                  bool speculates = false) {
  CrashWorld world = before;
  std::mt19937_64 random(seed);
  const std::uint64_t lives = 1 + random() % 3;
  std::string story;
  for (std::uint64_t life = 0; life < lives; ++life) {
    const std::uint64_t cut = 1 + random() % events;
    const LaunchResult died = world.launch({.start = Start::kAuto,
                                            .steps = 2,
                                            .seed = random(),
                                            .power_cut_after = cut,
                                            .speculates = speculates});
    const bool power = random() % 3 != 0;
    if (power) {
      world.disk().crash(random());
    } else {
      world.disk().kill(random());
    }
    story +=
        fmt::format("\n  life {}: {} after event {} of {}, resumed at {}, {}", life,
                    power ? "power cut" : "killed", cut, died.events,
                    died.started ? fmt::format("{}", died.resumed_at) : "nothing", describe(died));
  }
  const LaunchResult back = world.launch({.start = Start::kAuto, .steps = 1, .seed = random()});
  ASSERT_EQ(world.fault(), "") << "seed " << seed << story;
  ASSERT_EQ(describe(back), "finished") << "seed " << seed << story;
}

TEST(StoreCrash, OneRankManyLives) {
  const CrashWorld before = trained({}, 1);
  const std::uint64_t events = events_of(before, {.start = Start::kResume, .steps = 2});
  for (std::uint64_t seed = 0; seed < campaign_cases(1500) && !HasFatalFailure(); ++seed)
    live_and_die(before, events, seed);
}

TEST(StoreCrash, RecordsOfUnevenArraysManyLives) {
  const CrashWorld before =
      trained({.record_bytes = uneven_records(), .record_format = uneven_format()}, 1);
  for (const bool speculates : {false, true}) {
    const std::uint64_t events =
        events_of(before, {.start = Start::kResume, .steps = 2, .speculates = speculates});
    for (std::uint64_t seed = 0; seed < campaign_cases(200) && !HasFatalFailure(); ++seed)
      live_and_die(before, events, seed, speculates);
  }
}

TEST(StoreCrash, TwoRanksManyLivesNeverMixHistories) {
  const CrashWorld before = trained({.ranks = 2, .record_bytes = {64 * 1024, 64 * 1024}}, 1);
  const std::uint64_t events = events_of(before, {.start = Start::kResume, .steps = 2});
  for (std::uint64_t seed = 0; seed < campaign_cases(2500) && !HasFatalFailure(); ++seed)
    live_and_die(before, events, seed);
}

// Stripes on several drives agree as ranks do.
TEST(StoreCrash, TwoStripesManyLivesNeverMixHistories) {
  for (const int ranks : {1, 2}) {
    const CrashWorld before =
        trained({.ranks = ranks, .stripes = 2, .record_bytes = {64 * 1024, 64 * 1024}}, 1);
    const std::uint64_t events = events_of(before, {.start = Start::kResume, .steps = 2});
    for (std::uint64_t seed = 0; seed < campaign_cases(400) && !HasFatalFailure(); ++seed)
      live_and_die(before, events, seed);
  }
}

struct Shape {
  int ranks;
  int stripes;
};

// Records written on a guess and discarded lie in the slots of the generation being made, whole,
// torn, or over the ones written after them: none of it is ever taken for a generation.
TEST(StoreCrash, DiscardedRecordsNeverComeBack) {
  for (const auto& [ranks, stripes] : {Shape{1, 1}, Shape{2, 1}, Shape{1, 2}}) {
    const CrashWorld before = trained({.ranks = ranks, .stripes = stripes}, 1);
    const Launch honest{.start = Start::kResume, .steps = 2};
    const Launch guesses{.start = Start::kResume, .steps = 2, .speculates = true};
    const std::uint64_t events = events_of(before, guesses);
    EXPECT_GT(events, events_of(before, honest)) << "records are written twice";
    for (std::uint64_t seed = 0; seed < campaign_cases(700) && !HasFatalFailure(); ++seed)
      live_and_die(before, events, seed, /*speculates=*/true);
  }
}

TEST(StoreCrash, CreationCutOffLeavesNothingOrAStore) {
  for (const auto& [ranks, stripes] : {Shape{1, 1}, Shape{2, 1}, Shape{1, 2}}) {
    const WorldOptions options{
        .ranks = ranks, .stripes = stripes, .record_bytes = {64 * 1024, 64 * 1024}};
    const CrashWorld before(options);
    const std::uint64_t events = events_of(before, {.start = Start::kCreate, .steps = 1});
    for (std::uint64_t seed = 0; seed < campaign_cases(250) && !HasFatalFailure(); ++seed)
      live_and_die(before, events, seed);
  }
}

TEST(StoreCrash, CreationCutOffLeavesTheOlderStoreOrTheNewOne) {
  for (const auto& [ranks, stripes] : {Shape{1, 1}, Shape{2, 1}, Shape{1, 2}}) {
    const CrashWorld before =
        trained({.ranks = ranks, .stripes = stripes, .record_bytes = {64 * 1024, 64 * 1024}}, 2);
    const std::uint64_t events = events_of(before, {.start = Start::kCreate, .steps = 0});
    std::map<std::uint64_t, unsigned> resumed_at;
    for (std::uint64_t seed = 0; seed < campaign_cases(250); ++seed) {
      CrashWorld world = before;
      world.launch({.start = Start::kCreate,
                    .steps = 0,
                    .seed = seed,
                    .power_cut_after = events - seed % std::min<std::uint64_t>(events, 40)});
      if (seed % 3 == 0) {
        world.disk().kill(seed);
        world.launch(
            {.start = Start::kAuto, .steps = 1, .seed = seed, .power_cut_after = 1 + seed % 97});
      }
      world.disk().crash(seed);
      const LaunchResult back =
          world.launch({.start = Start::kResume, .steps = 1, .seed = seed + 1});
      ASSERT_EQ(world.fault(), "")
          << "seed " << seed << ", " << ranks << " ranks, " << stripes << " stripes";
      ++resumed_at[back.resumed_at];
    }
    EXPECT_GT(resumed_at[0], campaign_cases(10));
    EXPECT_GT(resumed_at[2], campaign_cases(10));
  }
}

// The store that is replaced may be of any shape: of more ranks, here.
TEST(StoreCrash, CreationCutOffBetweenTwoRenamesIsFinishedOverAStoreOfAnotherShape) {
  CrashWorld old = trained({.ranks = 4, .record_bytes = {64 * 1024, 64 * 1024}}, 2);
  CrashWorld before({.ranks = 2, .record_bytes = {64 * 1024, 64 * 1024}});
  before.disk() = old.disk();
  const std::uint64_t events = events_of(before, {.start = Start::kCreate, .steps = 0});
  unsigned finished = 0;
  for (std::uint64_t seed = 0; seed < campaign_cases(300); ++seed) {
    CrashWorld world = before;
    world.launch(
        {.start = Start::kCreate, .steps = 0, .seed = seed, .power_cut_after = events - seed % 20});
    if (seed % 2 == 0) {
      world.disk().crash(seed);
    } else {
      world.disk().kill(seed);
    }
    const int unfinished = static_cast<int>(world.disk().exists(world.temporary_path(0))) +
                           static_cast<int>(world.disk().exists(world.temporary_path(1)));
    if (unfinished != 1) continue;  // before the first rename, or after the last
    const LaunchResult back = world.launch({.start = Start::kResume, .steps = 1, .seed = seed + 1});
    ASSERT_EQ(world.fault(), "") << "seed " << seed;
    ASSERT_EQ(describe(back), "finished") << "seed " << seed;
    ++finished;
  }
  EXPECT_GT(finished, campaign_cases(10));
}

// The suite can fail: with any one of the store's syncs taken away, it finds the store out. In a
// launch that resumes a clean store, sync 0 is open()'s; then each commit has one before its
// superblock and one after.
using Lie = std::function<bool(std::uint64_t index)>;

/// The store found something damaged: that a drive which keeps its promises never shows.
bool speaks_of_damage(const LaunchResult& result) {
  return std::ranges::any_of(result.notes, [](const std::vector<std::string>& notes) {
    return std::ranges::any_of(notes, [](const std::string& note) {
      return note.find("is damaged") != std::string::npos;
    });
  });
}

/// How many seeds show that a sync is missing.
struct Caught {
  int lost = 0;  ///< a generation that was reported durable is gone, or nothing opens
  int accused =
      0;  ///< nothing is lost, but a generation is given up as damaged, on a healthy drive
};

/// A power cut at any event of two steps, 1,000 seeds.
Caught caught_by_power_cut(const Lie& lie) {
  const CrashWorld before = trained({}, 1);
  const std::uint64_t events = events_of(before, {.start = Start::kResume, .steps = 2});
  Caught caught;
  for (std::uint64_t seed = 0; seed < campaign_cases(1000); ++seed) {
    CrashWorld world = before;
    world.launch({.start = Start::kResume,
                  .steps = 2,
                  .seed = seed,
                  .power_cut_after = 1 + seed % events,
                  .sync_is_a_lie = lie});
    world.disk().crash(seed);
    const LaunchResult back = world.launch({.start = Start::kResume, .steps = 0, .seed = seed + 1});
    if (!world.fault().empty()) {
      ++caught.lost;
    } else if (speaks_of_damage(back)) {
      ++caught.accused;
    }
  }
  return caught;
}

/// A job that is killed just before its last sync has returned, and whose successor loses power in
/// its first writes: seeds that lose a generation.
int caught_by_kill_and_power_cut(const Lie& lie) {
  const CrashWorld before = trained({}, 1);
  const std::uint64_t step_events = events_of(before, {.start = Start::kResume, .steps = 1});
  const std::uint64_t open_events = events_of(before, {.start = Start::kResume, .steps = 0});
  int caught = 0;
  for (std::uint64_t seed = 0; seed < campaign_cases(1000); ++seed) {
    CrashWorld world = before;
    world.launch({.start = Start::kResume,
                  .steps = 1,
                  .seed = seed,
                  .power_cut_after = step_events - 1 - seed % 3});
    world.disk().kill(seed);
    world.launch({.start = Start::kResume,
                  .steps = 1,
                  .seed = seed,
                  .power_cut_after = open_events + 1 + seed % 8,
                  .sync_is_a_lie = lie});
    world.disk().crash(seed);
    world.launch({.start = Start::kResume, .steps = 0, .seed = seed + 1});
    if (!world.fault().empty()) ++caught;
  }
  return caught;
}

TEST(StoreCrash, IsNotAccusedWithAllItsSyncs) {
  const Lie none = [](std::uint64_t) { return false; };
  const Caught caught = caught_by_power_cut(none);
  EXPECT_EQ(caught.lost, 0);
  EXPECT_EQ(caught.accused, 0);
  EXPECT_EQ(caught_by_kill_and_power_cut(none), 0);
}
// A superblock then survives where its records do not. That generation was not promised yet, since
// the sync after the superblock covers the records too; and the one before is whole, and open(),
// which proves every record, goes back to it. So this sync keeps no promise by itself: it keeps a
// healthy drive from looking like a damaged one, and that is what its absence shows.
TEST(StoreCrash, IsCaughtWithoutTheSyncBeforeTheSuperblock) {
  const Caught caught = caught_by_power_cut([](std::uint64_t index) { return index % 2 == 1; });
  EXPECT_GT(caught.accused, 0);
  EXPECT_EQ(caught.lost, 0) << "recovery goes back to what was promised";
}
TEST(StoreCrash, IsCaughtWithoutTheSyncAfterTheSuperblock) {
  const Caught caught =
      caught_by_power_cut([](std::uint64_t index) { return index > 0 && index % 2 == 0; });
  EXPECT_GT(caught.lost, 0);
}
TEST(StoreCrash, IsCaughtWithoutTheSyncBeforeRecoveryBelievesWhatItReads) {
  EXPECT_GT(caught_by_kill_and_power_cut([](std::uint64_t index) { return index == 0; }), 0);
}

}  // namespace
}  // namespace ziggurat::faults
