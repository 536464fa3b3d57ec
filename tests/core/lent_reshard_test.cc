// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_reshard_test.cc: the store of ranks that lend pieces, divided anew in place for
// other ranks and other pieces, has the same bits as whole tensors, and goes on with them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "tests/core/piece_world.h"
#include "tiers/store/state_store.h"

namespace ziggurat::testing {
namespace lent_reshard_test {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using Resume = EngineConfig::Resume;
namespace fs = std::filesystem;

const std::vector<LentKind> kKinds{{StateFormat::kFp32, DType::kFloat32},
                                   {StateFormat::kFp32, DType::kBFloat16},
                                   {StateFormat::kSplit, DType::kBFloat16},
                                   {StateFormat::kBf16Moments, DType::kFloat32},
                                   {StateFormat::k8Bit, DType::kFloat32}};

/// The error that every rank's opening of the store ends with, one after the other.
std::string refusal(const PieceWorld& world, const Division& division, Resume resume) {
  std::string words;
  for (const std::exception_ptr& error :
       world.run(division, resume, [](const PieceWorld::Rank&) { ADD_FAILURE() << "opened"; })) {
    EXPECT_TRUE(error);
    words += std::string(error_in(error).what()) + "\n";
  }
  return words;
}

class LentReshardOf : public ::testing::TestWithParam<LentKind> {
 protected:
  /// From `first` to `second`, to one rank, and on: to what `first` would have had.
  void expect_kept(const Division& first, const Division& second) const {
    const PieceWorld world(GetParam(), scratch_.path() + "/store");
    const WholeState before = world.trained(first, Resume::kAuto, 3);
    fs::copy(scratch_.path() + "/store", scratch_.path() + "/kept", fs::copy_options::recursive);
    EXPECT_EQ(before.at("large").size(), 600'000 * before.at("norm").size() / 640);
    for (const Division& next : {second, Division{1, Cut::kCopies}, second}) {
      EXPECT_EQ(world.trained(next, Resume::kReshard, 0), before) << next.ranks << " ranks";
      expect_none(world.run(next, Resume::kAuto, [](const PieceWorld::Rank& rank) {
        EXPECT_EQ(rank.engine.generation(), 3U);
        EXPECT_TRUE(rank.engine.resumed());
      }));
      EXPECT_EQ(world.state(), before);
    }
    const PieceWorld kept(GetParam(), scratch_.path() + "/kept");
    EXPECT_EQ(world.trained(second, Resume::kReshard, 2), kept.trained(first, Resume::kAuto, 2));
    EXPECT_FALSE(fs::exists(scratch_.path() + "/store/resharded"));
  }
  ScratchDirectory scratch_;
};

TEST_P(LentReshardOf, RunsKeepsEveryBit) { expect_kept({2, Cut::kRuns}, {3, Cut::kRuns}); }

TEST_P(LentReshardOf, RowsKeepsEveryBit) {
  // 150 and 100 rows of 100 elements are no whole blocks.
  if (GetParam().format == StateFormat::k8Bit) GTEST_SKIP() << "cut within blocks";
  expect_kept({2, Cut::kRows}, {3, Cut::kRows});
}

TEST_P(LentReshardOf, RowsToRunsKeepsEveryBit) {
  if (GetParam().format == StateFormat::k8Bit) GTEST_SKIP() << "cut within blocks";
  expect_kept({3, Cut::kRows}, {2, Cut::kUneven});
}

INSTANTIATE_TEST_SUITE_P(Kinds, LentReshardOf, ::testing::ValuesIn(kKinds),
                         [](const auto& its) { return name_of(its.param); });

class LentReshard : public ::testing::Test {
 protected:
  ScratchDirectory scratch_;
  const PieceWorld world_{{StateFormat::kFp32, DType::kFloat32}, scratch_.path()};
};

TEST_F(LentReshard, OfColumnsAndOfCopiesKeepsEveryBit) {
  const WholeState before = world_.trained({2, Cut::kColumns}, Resume::kAuto, 3);
  EXPECT_EQ(world_.trained({3, Cut::kCopies}, Resume::kReshard, 0), before);
  EXPECT_EQ(world_.trained({3, Cut::kColumns}, Resume::kReshard, 0), before);
  EXPECT_EQ(world_.trained({1, Cut::kRows}, Resume::kReshard, 0), before);
}

TEST_F(LentReshard, LeavesAStoreThatFitsAsItIs) {
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kReshard, 2);
  const auto file = fs::path(scratch_.path()) / "rank00000.ziggurat";
  const auto inode = [&] {
    struct ::stat about {};
    EXPECT_EQ(::stat(file.c_str(), &about), 0);
    return about.st_ino;
  };
  const auto its = inode();
  EXPECT_EQ(world_.trained({2, Cut::kRuns}, Resume::kReshard, 0), before);
  EXPECT_EQ(inode(), its);
}

TEST_F(LentReshard, IsNamedWhereAStoreOfOtherRanksOrPiecesIsRefused) {
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kAuto, 1);
  for (const Division& other : {Division{3, Cut::kRuns}, Division{1, Cut::kCopies},
                                Division{2, Cut::kUneven}, Division{2, Cut::kRows}})
    EXPECT_THAT(refusal(world_, other, Resume::kAuto), HasSubstr("resume=reshard"));
  EXPECT_EQ(world_.state(), before);
}

TEST_F(LentReshard, IsRefusedWhereTheStoreDoesNotSayWhereItsPiecesLie) {
  PieceWorld old(LentKind{StateFormat::kFp32, DType::kFloat32}, scratch_.path());
  old.change = [](ModelSpec& model) {
    for (UnitSpec& unit : model.units) unit.params[0].whole.reset();
  };
  expect_none(old.run({2, Cut::kRuns}, Resume::kAuto,
                      [](const PieceWorld::Rank& rank) { rank.trainer.step(rank.engine); }));
  EXPECT_THAT(refusal(world_, {3, Cut::kRuns}, Resume::kReshard),
              HasSubstr("does not record to which tensors the pieces"));
  // Its own ranks go on, whether they say it now or not.
  for (const Resume resume : {Resume::kAuto, Resume::kReshard}) {
    expect_none(world_.run({2, Cut::kRuns}, resume, [](const PieceWorld::Rank& rank) {
      EXPECT_EQ(rank.engine.generation(), 1U);
    }));
  }
}

TEST_F(LentReshard, IsRefusedWhereTensorsDiffer) {
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kAuto, 1);
  PieceWorld other(LentKind{StateFormat::kFp32, DType::kFloat32}, scratch_.path());
  other.change = [](ModelSpec& model) { model.units[0].params[0].whole->name = "another"; };
  EXPECT_THAT(refusal(other, {3, Cut::kRuns}, Resume::kReshard),
              HasSubstr("has no state of 'another', which this run trains"));
  other.change = [](ModelSpec& model) { model.units[0].params[0].whole->name = ""; };
  EXPECT_THAT(refusal(other, {3, Cut::kRuns}, Resume::kReshard),
              HasSubstr("has state of 'embedding', of which this run's ranks do not train"));
  other.change = [](ModelSpec& model) { model.units[0].params[0].whole->first = 1 << 20; };
  EXPECT_THAT(refusal(other, {3, Cut::kRuns}, Resume::kReshard), HasSubstr("cannot be that part"));
  other.change = [](ModelSpec& model) { model.units[0].params[0].whole.reset(); };
  EXPECT_THAT(refusal(other, {3, Cut::kRuns}, Resume::kReshard), HasSubstr("give `pieces`"));
  EXPECT_EQ(world_.state(), before);
}

TEST_F(LentReshard, NamesWhatBelongsToNoTensorAndBeginsAnew) {
  PieceWorld own(LentKind{StateFormat::kFp32, DType::kFloat32}, scratch_.path());
  own.change = [](ModelSpec& model) {
    for (UnitSpec& unit : model.units)
      if (unit.name == "norm" || unit.name == "bias") unit.params[0].whole.emplace();
  };
  own.trained({1, Cut::kCopies}, Resume::kAuto, 2);
  expect_none(own.run({2, Cut::kCopies}, Resume::kReshard, [&](const PieceWorld::Rank& rank) {
    std::string said;
    for (const std::string& note : rank.engine.description()) said += note + "\n";
    EXPECT_THAT(said, HasSubstr("'bias', 'norm' on this rank belong to no whole tensor"));
    EXPECT_THAT(said, HasSubstr("the source has no optimizer state of 'bias', 'norm'"));
    EXPECT_THAT(said, Not(HasSubstr("frozen")));
    constexpr ParamId kNorm = 4;
    std::vector<float> values(rank.trainer.model().units[kNorm].count(), 1.0F);
    rank.engine.read_state(kNorm, "exp_avg", values);
    EXPECT_THAT(values, Each(0.0F));
  }));
}

TEST_F(LentReshard, ThatFailsOnOneRankLeavesTheOldStore) {
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kAuto, 2);
  PieceWorld failing(LentKind{StateFormat::kFp32, DType::kFloat32}, scratch_.path());
  failing.before_seal = [](int rank) {
    if (rank == 2) throw Error(ErrorCode::kUnavailable, "rank 2 has no power");
  };
  EXPECT_THAT(refusal(failing, {3, Cut::kRuns}, Resume::kReshard), HasSubstr("no power"));
  EXPECT_EQ(world_.state(), before);
  expect_none(world_.run({2, Cut::kRuns}, Resume::kAuto, [](const PieceWorld::Rank& rank) {
    EXPECT_EQ(rank.engine.generation(), 2U);
  }));
  EXPECT_FALSE(fs::exists(scratch_.path() + "/resharded"));
  EXPECT_EQ(world_.trained({3, Cut::kRuns}, Resume::kReshard, 0), before);
}

/// Names of all files in a folder.
std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

std::string rank_file(int rank) { return StateStore::file_name(rank); }

class ReplacedStore : public ::testing::Test {
 protected:
  ReplacedStore() : folder_(scratch_.path()) {}
  static PieceWorld world_in(const fs::path& folder) {
    PieceWorld world({StateFormat::kFp32, DType::kFloat32}, folder.string(), kFewWholes);
    world.host_budget_bytes = 8 * kMiB;
    return world;
  }
  /// A store of other values, in a folder of its own.
  static WholeState made(const fs::path& folder, const Division& division, int steps) {
    return world_in(folder).trained(division, Resume::kAuto, steps);
  }
  ScratchDirectory scratch_;
  const fs::path folder_;
  const PieceWorld world_ = world_in(folder_);
};

TEST_F(ReplacedStore, OfMoreRanksLeavesNothingThatOthersTrip) {
  world_.trained({3, Cut::kRuns}, Resume::kAuto, 1);
  std::ofstream(folder_ / rank_file(7)) << "no file of a store";
  made(folder_ / "other", {5, Cut::kRuns}, 1);
  fs::copy(folder_ / "other" / rank_file(4), folder_ / rank_file(4));
  fs::remove_all(folder_ / "other");
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kNever, 2);
  EXPECT_EQ(names_in(folder_), (std::set{rank_file(0), rank_file(1), rank_file(4), rank_file(7)}));
  EXPECT_EQ(world_.trained({1, Cut::kCopies}, Resume::kReshard, 0), before);
}

// A kill after the renames, or a version that removed nothing.
TEST_F(ReplacedStore, WhoseFilesWereLeftIsNotMistakenForMoreRanks) {
  made(folder_ / "old", {3, Cut::kRuns}, 1);
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kAuto, 2);
  fs::rename(folder_ / "old" / rank_file(2), folder_ / rank_file(2));
  fs::remove_all(folder_ / "old");
  EXPECT_EQ(world_.state(), before);
  EXPECT_EQ(world_.trained({1, Cut::kCopies}, Resume::kReshard, 0), before);
  EXPECT_EQ(names_in(folder_), std::set{rank_file(0)});
}

TEST_F(ReplacedStore, WhoseRanksWereNotAllRenamedIsReplacedFirst) {
  made(folder_ / "old", {3, Cut::kRuns}, 2);
  const WholeState before = made(folder_ / "new", {2, Cut::kUneven}, 1);
  for (const bool over_old : {false, true}) {
    for (const int renamed : {0, 1}) {
      const fs::path cut = folder_ / "cut";
      for (const Division& next : {Division{1, Cut::kCopies}, Division{2, Cut::kUneven},
                                   Division{2, Cut::kRows}, Division{3, Cut::kRuns}}) {
        fs::remove_all(cut);
        fs::create_directory(cut);
        if (over_old) fs::copy(folder_ / "old", cut);
        const int left = 1 - renamed;
        fs::copy(folder_ / "new" / rank_file(renamed), cut / rank_file(renamed),
                 fs::copy_options::overwrite_existing);
        fs::copy(folder_ / "new" / rank_file(left), cut / StateStore::temporary_name(left));
        const PieceWorld world = world_in(cut);
        EXPECT_EQ(world.trained(next, Resume::kReshard, 0), before)
            << next.ranks << " ranks, rank " << renamed << " renamed";
        EXPECT_EQ(world.trained(next, Resume::kAuto, 0), before);
        EXPECT_FALSE(fs::exists(cut / StateStore::temporary_name(left)));
      }
    }
  }
}

TEST_F(ReplacedStore, OfWhichNoRankWasRenamedStands) {
  const WholeState before = world_.trained({2, Cut::kRuns}, Resume::kAuto, 1);
  made(folder_ / "new", {2, Cut::kUneven}, 2);
  for (const int rank : {0, 1})
    fs::rename(folder_ / "new" / rank_file(rank), folder_ / StateStore::temporary_name(rank));
  fs::remove(folder_ / "new");
  EXPECT_EQ(world_.trained({1, Cut::kCopies}, Resume::kReshard, 0), before);
}

TEST(LentReshardOf8Bits, IsRefusedWherePiecesAreCutWithinBlocks) {
  const ScratchDirectory scratch;
  const PieceWorld world({StateFormat::k8Bit, DType::kFloat32}, scratch.path());
  const WholeState before = world.trained({2, Cut::kRuns}, Resume::kAuto, 1);
  EXPECT_THAT(refusal(world, {3, Cut::kUneven}, Resume::kReshard), HasSubstr("within a block"));
  EXPECT_EQ(world.state(), before);
  const ScratchDirectory other;
  const PieceWorld uneven({StateFormat::k8Bit, DType::kFloat32}, other.path());
  expect_none(uneven.run({2, Cut::kUneven}, Resume::kAuto, [](const PieceWorld::Rank& rank) {
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
  }));
  EXPECT_THAT(refusal(uneven, {1, Cut::kCopies}, Resume::kReshard),
              HasSubstr("cut within such blocks"));
}

}  // namespace lent_reshard_test
}  // namespace ziggurat::testing
