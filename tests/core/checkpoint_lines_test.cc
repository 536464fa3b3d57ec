// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_lines_test.cc: lines of history in a folder of checkpoints: which is the
// newest, what retention counts, and what it leaves alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/checkpoint/checkpoint_folder.h"
#include "core/checkpoint/line_history.h"
#include "tests/core/checkpoint_rig.h"

namespace ziggurat::testing {
namespace checkpoint_lines_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr LineId kFirst{1, 1};
constexpr LineId kChild{2, 2};
constexpr LineId kOther{3, 3};
const StateLine kFirstLine{.id = kFirst, .epoch = 1, .parent = {}, .left_at = 0};
const StateLine kChildLine{.id = kChild, .epoch = 1, .parent = kFirst, .left_at = 20};

CheckpointFacts fact(std::uint64_t step, const std::optional<StateLine>& line,
                     const std::string& flaw = "") {
  CheckpointFacts its;
  its.entry = {.step = step,
               .name = line ? checkpoint_name(step, line->id) : checkpoint_name(step)};
  its.line = line;
  its.readable = true;
  its.flaw = flaw;
  return its;
}

std::vector<std::uint64_t> steps_of(const std::vector<CheckpointFacts>& all) {
  std::vector<std::uint64_t> steps;
  for (const CheckpointFacts& its : all) steps.push_back(its.entry.step);
  return steps;
}

TEST(LinesOfHistory, ThatNoOtherWasMadeFromAreTheNewest) {
  const std::vector<CheckpointFacts> all{fact(10, kFirstLine), fact(30, kFirstLine),
                                         fact(25, kChildLine), fact(5, {})};
  const LineHistory one(all);
  ASSERT_EQ(one.newest().size(), 1U) << "the first was left, though it has the highest step";
  EXPECT_EQ(one.newest().front()->id, kChild);
  std::vector<CheckpointFacts> two = all;
  two.push_back(fact(40, StateLine{.id = kOther, .epoch = 1, .parent = {}, .left_at = 0}));
  EXPECT_EQ(LineHistory(two).newest().size(), 2U);
  const std::vector<CheckpointFacts> none{fact(5, {}), fact(6, {})};
  ASSERT_EQ(LineHistory(none).newest().size(), 1U);
  EXPECT_FALSE(LineHistory(none).newest().front()->id);
}

TEST(LinesOfHistory, ALineBetweenTwoOthersHasAnEarlierAndALaterOne) {
  const StateLine last{.id = kOther, .epoch = 1, .parent = kChild, .left_at = 25};
  const std::vector<CheckpointFacts> all{fact(10, kFirstLine), fact(25, kChildLine),
                                         fact(26, last)};
  const LineHistory history(all);
  const LineOfCheckpoints& between = *history.find(kChild);
  EXPECT_EQ(history.left_by(between), kFirst);
  EXPECT_EQ(history.that_left(between), kOther);
  EXPECT_FALSE(history.left_by(*history.find(kFirst)));
  EXPECT_FALSE(history.that_left(*history.find(kOther)));
}

TEST(LinesOfHistory, AreBesideALineThoughOnlyTheirNamesCanBeRead) {
  const StateLine last{.id = kOther, .epoch = 1, .parent = kChild, .left_at = 25};
  std::vector<CheckpointFacts> all{fact(10, kFirstLine), fact(25, kChildLine), fact(26, last)};
  all.front().readable = all.back().readable = false;
  const LineHistory history(all);
  EXPECT_EQ(history.left_by(*history.find(kChild)), kFirst);
  EXPECT_EQ(history.that_left(*history.find(kChild)), kOther);
}

TEST(LinesOfHistory, ALineIsNotTheNewestIfWhatLeftItCannotBeReadButForItsName) {
  std::vector<CheckpointFacts> all{fact(20, kFirstLine), fact(30, kFirstLine),
                                   fact(40, kChildLine)};
  all.back().readable = false;
  const LineHistory history(all);
  ASSERT_EQ(history.newest().size(), 1U);
  EXPECT_EQ(history.newest().front()->id, kChild);
  EXPECT_THAT(steps_of(history.of(kChildLine)), ElementsAre(40, 20));
}

TEST(LinesOfHistory, SayWhyOnlyTheirNamesCanBeRead) {
  std::vector<CheckpointFacts> all{fact(20, kFirstLine),
                                   fact(40, kChildLine, "/c/manifest.json is damaged")};
  all.back().readable = false;
  const LineHistory history(all);
  EXPECT_THAT(history.find(kChild)->description(),
              HasSubstr("of which only the name can be read: /c/manifest.json is damaged"));
  EXPECT_THAT(history.find(kFirst)->description(), Not(HasSubstr("only the name")));
}

TEST(LinesOfHistory, ComeFromWhatAWholeManifestSaysNotADamagedOne) {
  const StateLine damaged{.id = kChild, .epoch = 1, .parent = kOther, .left_at = 3};
  std::vector<CheckpointFacts> all{fact(20, kFirstLine), fact(30, kChildLine),
                                   fact(40, damaged, "damaged")};
  all.back().readable = false;
  EXPECT_EQ(LineHistory(all).find(kChild)->parent, kFirst);
  std::swap(all[1], all[2]);
  EXPECT_EQ(LineHistory(all).find(kChild)->parent, kFirst);
}

TEST(LinesOfHistory, AStateGoesBackToItsOwnThenToWhatItWasMadeFrom) {
  const std::vector<CheckpointFacts> all{fact(10, kFirstLine), fact(20, kFirstLine),
                                         fact(30, kFirstLine), fact(25, kChildLine),
                                         fact(5, {}),          fact(60, {})};
  const LineHistory history(all);
  EXPECT_THAT(steps_of(history.of(kChildLine)), ElementsAre(25, 20, 10, 60, 5))
      << "never the 30 that it left";
  EXPECT_THAT(steps_of(history.of(kFirstLine)), ElementsAre(30, 20, 10, 60, 5));
  const StateLine unsaved{.id = kOther, .epoch = 1, .parent = kChild, .left_at = 22};
  EXPECT_THAT(steps_of(history.of(unsaved)), ElementsAre(20, 10, 60, 5));
  EXPECT_THAT(steps_of(history.of(std::nullopt)), ElementsAre(60, 5));
}

TEST(LinesOfHistory, WhatCannotBeReadMayBeOfAnyLine) {
  CheckpointFacts unreadable = fact(28, {});
  unreadable.readable = false;
  const std::vector<CheckpointFacts> all{fact(10, kFirstLine), fact(30, kFirstLine), unreadable};
  EXPECT_THAT(steps_of(LineHistory(all).of(kFirstLine)), ElementsAre(30, 28, 10));
}

TEST(RetentionOfALine, CountsWhatIsOfItWithoutAFlawAndOlder) {
  const std::vector<CheckpointFacts> all{fact(10, kFirstLine), fact(20, kFirstLine, "damaged"),
                                         fact(25, kChildLine), fact(30, kFirstLine),
                                         fact(35, {}),         fact(90, kFirstLine)};
  const auto gone = [&](Retention retention) {
    std::vector<std::uint64_t> steps;
    for (const CheckpointEntry& its : expired(all, retention, fact(40, kFirstLine)))
      steps.push_back(its.step);
    return steps;
  };
  EXPECT_THAT(gone({.keep_last = 1}), ElementsAre(10, 30));
  EXPECT_THAT(gone({.keep_last = 2}), ElementsAre(10));
  EXPECT_THAT(gone({.keep_last = 3}), IsEmpty()) << "the damaged one is none of the three";
  EXPECT_THAT(gone({.keep_last = 0}), IsEmpty());
}

class CheckpointFolder : public ::testing::Test {
 protected:
  /// A line of its own, which has saved these steps.
  void save(const std::string& store, const std::vector<int>& steps, const std::string& from = "",
            std::uint64_t keep_last = 0) {
    on_ranks({.name = store}, scratch_, from, [&](CheckpointRank& rank) {
      while (rank.engine->generation() < static_cast<std::uint64_t>(steps.back())) {
        rank.step();
        if (std::ranges::find(steps, static_cast<int>(rank.engine->generation())) == steps.end())
          continue;
        rank.engine->save_checkpoint({.folder = folder_, .resume = {}, .keep_last = keep_last});
        for (const SaveOutcome& its : rank.engine->ended_saves()) {
          made_.push_back(its.directory);
          notes_.insert(notes_.end(), its.notes.begin(), its.notes.end());
        }
      }
    });
  }
  std::string directory(std::uint64_t step) const { return folder_ + "/" + checkpoint_name(step); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_))
      if (entry.is_directory()) all.push_back(entry.path().filename().string());
    return all;
  }
  template <class Work>
  auto with_io(const Work& work) {
    const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
    ThreadEngine io(runtime->reactor);
    return work(TextPlace{.reactor = runtime->reactor, .io = io});
  }
  std::string newest() {
    return with_io([&](const TextPlace& place) {
      return place.reactor.block_on(find_checkpoint(place, folder_));
    });
  }

  ScratchDirectory scratch_;
  std::string folder_ = scratch_.path() + "/checkpoints";
  std::vector<std::string> made_;
  std::vector<std::string> notes_;
};

TEST_F(CheckpointFolder, HoldsALineThatWasLeftBesideTheOneThatGoesOn) {
  save("first", {2, 4, 6});
  save("back", {3, 4, 5}, directory(2), 1);
  // Its 4 was of another name, since the first line's has that; and of its own it keeps the newest.
  EXPECT_THAT(made_, Contains(HasSubstr(checkpoint_name(4) + "-")));
  EXPECT_THAT(names(), UnorderedElementsAre(checkpoint_name(2), checkpoint_name(4),
                                            checkpoint_name(5), checkpoint_name(6)));
  EXPECT_EQ(newest(), directory(5)) << "6 is newer, and of the line that was left";
}

TEST_F(CheckpointFolder, OfTwoLinesThatNoneLeftSaysThatNoneIsTheNewest) {
  save("first", {2});
  save("second", {3});
  try {
    static_cast<void>(newest());
    ADD_FAILURE() << "chosen";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("several lines"), HasSubstr("up to step 2"),
                                    HasSubstr("up to step 3")));
  }
}

/// By its manifest's hash, a file's size, or the mark of a resume that read it.
TEST_F(CheckpointFolder, ReplacesADamagedCheckpointOfTheStepThatIsSavedAgain) {
  on_ranks({.name = "one"}, scratch_, "", [&](CheckpointRank& rank) {
    rank.step();
    const CheckpointRequest request{.folder = folder_, .resume = {}};
    rank.engine->save_checkpoint(request);
    EXPECT_THROW(rank.engine->save_checkpoint(request), Error) << "a whole one stays";
    const std::vector<std::function<void()>> damages{
        [&] { std::ofstream(directory(1) + "/manifest.json", std::ios::app) << "x"; },
        [&] { fs::resize_file(directory(1) + "/rank-00000-of-00001-00000.safetensors", 100); },
        [&] { std::ofstream(directory(1) + "/damaged") << "chunk 3\n"; }};
    for (const auto& damage : damages) {
      damage();
      rank.engine->save_checkpoint(request);
      EXPECT_THROW(rank.engine->save_checkpoint(request), Error) << "it is whole again";
    }
    EXPECT_THAT(rank.engine->ended_saves().back().notes, Contains(HasSubstr("is replaced")));
  });
  EXPECT_THAT(names(), ElementsAre(checkpoint_name(1)));
}

/// A file that cannot be opened at this moment may be whole: its drive may have an error, or its
/// server be away.
TEST_F(CheckpointFolder, DoesNotReplaceACheckpointThatCannotBeReadNow) {
  on_ranks({.name = "one"}, scratch_, "", [&](CheckpointRank& rank) {
    rank.step();
    const CheckpointRequest request{.folder = folder_, .resume = {}};
    rank.engine->save_checkpoint(request);
    const std::string shard = directory(1) + "/rank-00000-of-00001-00000.safetensors";
    fs::rename(shard, scratch_.path() + "/aside");
    fs::create_symlink(shard, shard);  // ELOOP
    try {
      rank.engine->save_checkpoint(request);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("is not replaced"), HasSubstr("ELOOP")));
    }
    EXPECT_TRUE(fs::exists(directory(1) + "/manifest.json"));
    fs::remove(shard);
    fs::rename(scratch_.path() + "/aside", shard);
    try {
      rank.engine->save_checkpoint(request);
      ADD_FAILURE() << "a whole one stays";
    } catch (const Error& error) {
      EXPECT_EQ(error.native(), EEXIST);
    }
  });
}

TEST_F(CheckpointFolder, KnowsTheNewestOfALineHoweverItsPathIsWritten) {
  save("one", {1, 2});
  const auto is_newest = [&](const std::string& path) {
    return with_io([&](const TextPlace& place) {
      return place.reactor.block_on(is_newest_of_line(place, path));
    });
  };
  EXPECT_TRUE(is_newest(directory(2)));
  EXPECT_TRUE(is_newest(directory(2) + "/"));
  EXPECT_FALSE(is_newest(directory(1) + "/"));
}

TEST_F(CheckpointFolder, LeavesWhatNoSaveMadeAndSaysSo) {
  const auto disturb = [&] {
    fs::create_directory(directory(1) + "/.ipynb_checkpoints");
    fs::rename(directory(2), scratch_.path() + "/archive");
    fs::create_directory_symlink(scratch_.path() + "/archive", directory(2));
    fs::create_directory_symlink("/nowhere/at/all", directory(7));
    fs::create_directory(directory(8));
    std::ofstream(directory(8) + "/thesis.txt") << "my thesis";
  };
  on_ranks({.name = "one"}, scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 1; step <= 8; ++step) {
      if (step == 4) disturb();
      rank.step();
      rank.engine->save_checkpoint(
          {.folder = folder_, .resume = {}, .keep_last = step < 4 ? 9U : 1U});
      for (const SaveOutcome& its : rank.engine->ended_saves()) {
        made_.push_back(its.directory);
        notes_.insert(notes_.end(), its.notes.begin(), its.notes.end());
      }
    }
  });
  EXPECT_TRUE(fs::exists(directory(1) + "/.ipynb_checkpoints"));
  EXPECT_FALSE(fs::exists(directory(1) + "/manifest.json"));
  EXPECT_TRUE(fs::exists(scratch_.path() + "/archive/manifest.json")) << "a link is not followed";
  EXPECT_TRUE(fs::is_symlink(directory(7)));
  EXPECT_TRUE(fs::exists(directory(8) + "/thesis.txt"));
  EXPECT_FALSE(fs::exists(directory(8) + "/manifest.json"));
  EXPECT_THAT(made_.back(), HasSubstr(checkpoint_name(8) + "-"));
  EXPECT_TRUE(fs::exists(made_.back() + "/manifest.json"));
  EXPECT_THAT(notes_,
              AllOf(Contains(HasSubstr(".ipynb_checkpoints")), Contains(HasSubstr("thesis.txt"))));
}

TEST_F(CheckpointFolder, TakesANameThatIsGoneForDone) {
  save("one", {1});
  with_io([&](const TextPlace& place) {
    EXPECT_EQ(remove_checkpoint(place.io, directory(1)), "");
    EXPECT_FALSE(fs::exists(directory(1)));
    EXPECT_EQ(remove_checkpoint(place.io, directory(1)), "");
    return 0;
  });
}

}  // namespace checkpoint_lines_test
}  // namespace ziggurat::testing
