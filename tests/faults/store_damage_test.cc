// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_damage_test.cc: what the store does when the drive, or somebody, has changed
// its file: it uses what is whole, says so, and otherwise refuses without changing anything.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/faults/crash_world.h"
#include "tiers/store_layout.h"
#include "tiers/superblock.h"

namespace ziggurat::faults {
namespace {

using Start = Launch::Start;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr unsigned kOdd = 1;  // a store trained for three steps: generation 3 is odd, 2 is even
constexpr unsigned kEven = 0;

class StoreDamage : public testing::Test {
 protected:
  StoreDamage() : StoreDamage(WorldOptions{}) {}
  explicit StoreDamage(WorldOptions options) : world_(std::move(options)) {
    EXPECT_EQ(describe(world_.launch({.start = Start::kCreate, .steps = 3})), "finished");
    layout_ = StoreLayout::of(world_.spec(), store_text(world_.spec()).size());
  }

  /// Turns over every bit of the 512 bytes at `offset`.
  void damage(std::uint64_t offset, int rank = 0) {
    auto bytes = world_.disk().contents(world_.path(rank));
    const auto sector = std::span(bytes).subspan(offset, 512);
    for (std::byte& byte : sector) byte = ~byte;
    world_.disk().overwrite(world_.path(rank), offset, sector);
  }
  void damage_superblock(unsigned parity, int copy, int rank = 0) {
    damage(StoreLayout::superblock_offset(parity, copy, layout_.file_bytes), rank);
  }
  LaunchResult resume(int steps = 0) {
    return world_.launch({.start = Start::kResume, .steps = steps});
  }
  /// A launch that must fail, and leave every byte as it was.
  std::string refused(ErrorCode code, std::size_t rank = 0) {
    const auto before = world_.disk().contents(world_.path(0));
    LaunchResult result = resume();
    for (const auto& error : result.errors) EXPECT_TRUE(error) << "every rank stops";
    result.error = result.errors[rank];
    if (!result.error) return "finished";
    EXPECT_EQ(code_of(result.error), code) << describe(result);
    EXPECT_EQ(world_.disk().contents(world_.path(0)), before) << "a refusal changes nothing";
    return describe(result);
  }

  CrashWorld world_;
  StoreLayout layout_;
};

class TwoRankStoreDamage : public StoreDamage {
 protected:
  TwoRankStoreDamage() : StoreDamage(WorldOptions{.ranks = 2}) {}
};

class UnevenStoreDamage : public StoreDamage {
 protected:
  UnevenStoreDamage()
      : StoreDamage(
            WorldOptions{.record_bytes = uneven_records(), .record_format = uneven_format()}) {}
  std::uint64_t offset(std::size_t segment) const { return uneven_format().offset(segment, 2); }
};

TEST_F(StoreDamage, ACleanStoreHasNothingToSay) {
  const LaunchResult result = resume(1);
  EXPECT_EQ(describe(result), "finished");
  EXPECT_EQ(result.resumed_at, 3u);
  EXPECT_THAT(result.notes[0], IsEmpty());
}

TEST_F(StoreDamage, OneDamagedCopyIsReplacedByTheOther) {
  for (const unsigned parity : {kOdd, kEven}) {
    for (const int copy : {0, 1}) {
      damage_superblock(parity, copy);
      const LaunchResult result = resume();
      EXPECT_EQ(describe(result), "finished");
      EXPECT_EQ(result.resumed_at, 3u);
      EXPECT_THAT(
          result.notes[0],
          Contains(AllOf(HasSubstr(fmt::format("superblock {}, {} copy", parity ? "odd" : "even",
                                               copy ? "second" : "first")),
                         HasSubstr("used"))));
      EXPECT_THAT(resume().notes[0], IsEmpty()) << "it was repaired";
    }
  }
}

TEST_F(StoreDamage, TheGenerationBeforeIsUsedWhenBothCopiesOfTheNewestAreDamaged) {
  damage_superblock(kOdd, 0);
  damage_superblock(kOdd, 1);
  const LaunchResult result = resume();
  EXPECT_EQ(result.resumed_at, 2u);
  EXPECT_THAT(result.notes[0], Contains(HasSubstr("no whole copy")));
  const LaunchResult next = resume(2);
  EXPECT_EQ(describe(next), "finished") << "and training goes on from there";
  EXPECT_THAT(next.notes[0], IsEmpty());
}

TEST_F(StoreDamage, BothSuperblocksDamagedIsRefusedAndNamesWhatRemains) {
  for (const unsigned parity : {kOdd, kEven}) {
    for (const int copy : {0, 1}) damage_superblock(parity, copy);
  }
  EXPECT_THAT(refused(ErrorCode::kDataLoss),
              AllOf(HasSubstr(world_.path(0)), HasSubstr("both superblocks are damaged"),
                    HasSubstr("What remains")));
}

TEST_F(StoreDamage, ADamagedTableOrBlobTakesItsGenerationWithIt) {
  for (const bool table : {true, false}) {
    CrashWorld saved = world_;
    damage(table ? layout_.table_offset[kOdd] : layout_.blob_offset[kOdd]);
    const LaunchResult result = resume();
    EXPECT_EQ(describe(result), "finished");
    EXPECT_EQ(result.resumed_at, 2u);
    EXPECT_THAT(result.notes[0], Contains(HasSubstr(table ? "checksum table" : "blob")));
    EXPECT_THAT(result.notes[0], Contains(HasSubstr("fell back from generation 3 to 2")));
    world_.disk() = saved.disk();
  }
}

TEST_F(StoreDamage, FallingBackVerifiesEveryRecordFirst) {
  damage(layout_.table_offset[kOdd]);
  damage(layout_.record_offset(1, 2) + 64 * 1024);
  EXPECT_THAT(refused(ErrorCode::kDataLoss),
              AllOf(HasSubstr("generation 2"), HasSubstr("chunk 1"), HasSubstr("wrong checksum")));
}

// The format of the records is the store's own: it verifies them without being told.
TEST_F(UnevenStoreDamage, FallingBackVerifiesEveryArrayOfEveryRecordFirst) {
  damage(layout_.table_offset[kOdd]);
  const CrashWorld damaged = world_;
  const LaunchResult result = resume(1);
  EXPECT_EQ(describe(result), "finished");
  EXPECT_EQ(result.resumed_at, 2u);
  EXPECT_THAT(result.notes[0], Contains(HasSubstr("fell back from generation 3 to 2")));
  for (std::size_t segment = 0; segment < uneven_format().segments().size(); ++segment) {
    CrashWorld again = damaged;
    world_.disk() = again.disk();
    damage(layout_.record_offset(1, 2) + offset(segment + 1) - 512);
    EXPECT_THAT(refused(ErrorCode::kDataLoss),
                AllOf(HasSubstr("generation 2"), HasSubstr("chunk 1"), HasSubstr("wrong checksum")))
        << uneven_format().segments()[segment].name;
  }
}

TEST_F(StoreDamage, OneCopyOfTheLayoutTextIsEnough) {
  for (const int copy : {0, 1}) {
    damage(layout_.text_offset[copy]);
    const LaunchResult result = resume();
    EXPECT_EQ(result.resumed_at, 3u);
    EXPECT_THAT(result.notes[0], Contains(HasSubstr("layout text")));
    EXPECT_THAT(resume().notes[0], IsEmpty()) << "it was repaired";
  }
  damage(layout_.text_offset[0]);
  damage(layout_.text_offset[1]);
  EXPECT_THAT(refused(ErrorCode::kDataLoss), HasSubstr("both copies of the layout text"));
}

TEST_F(StoreDamage, AWrongRecordIsFoundByWhoReadsIt) {
  damage(layout_.record_offset(2, 3));
  resume();
  EXPECT_THAT(world_.fault(), HasSubstr("chunk 2 generation 3: the store's own hash does not fit"));
}

TEST_F(StoreDamage, AStoreThatIsNotThere) {
  CrashWorld empty{WorldOptions{}};
  const LaunchResult result = empty.launch({.start = Start::kResume});
  ASSERT_TRUE(result.error);
  EXPECT_EQ(code_of(result.error), ErrorCode::kInvalidArgument);
  EXPECT_THAT(describe(result), HasSubstr("there is no store here"));
}

TEST_F(StoreDamage, AShortenedFile) {
  world_.disk().truncate(world_.path(0), layout_.file_bytes - 128 * 1024);
  EXPECT_THAT(refused(ErrorCode::kDataLoss), HasSubstr(fmt::format("{}", layout_.file_bytes)));
  world_.disk().truncate(world_.path(0), 4096);
  EXPECT_THAT(refused(ErrorCode::kDataLoss), HasSubstr("4096 bytes"));
}

TEST_F(StoreDamage, AnotherFormatVersion) {
  Superblock later;
  later.version = kStoreFormatVersion + 1;
  std::vector<std::byte> block(kSuperblockBytes);
  encode_superblock(later, block);
  for (const unsigned parity : {kOdd, kEven}) {
    for (const int copy : {0, 1}) {
      world_.disk().overwrite(
          world_.path(0), StoreLayout::superblock_offset(parity, copy, layout_.file_bytes), block);
    }
  }
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument), HasSubstr("format version 2"));
}

TEST_F(StoreDamage, AnotherWorldSize) {
  CrashWorld pair{WorldOptions{.ranks = 2}};
  pair.launch({.start = Start::kCreate, .steps = 1});
  world_.disk() = pair.disk();
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument), HasSubstr("a store of 2 ranks, opened by 1"));
}

TEST_F(StoreDamage, AStoreInUse) {
  CrashWorld& world = world_;
  Reactor reactor(Clock::Kind::kVirtual);
  SimulatedEngine other(reactor, world.disk());
  OpenOptions options;
  options.writable = options.lock = true;
  const FileHandle held = other.open(world.path(0), options);
  for (const Start start : {Start::kResume, Start::kCreate}) {
    const LaunchResult result = world.launch({.start = start});
    ASSERT_TRUE(result.error);
    EXPECT_EQ(code_of(result.error), ErrorCode::kUnavailable);
    EXPECT_THAT(describe(result), HasSubstr("in use"));
  }
  other.close(held);
  EXPECT_EQ(resume().resumed_at, 3u) << "nothing was lost";
}

TEST_F(StoreDamage, AFullDiskSaysWhatItNeedsAndLeavesNothing) {
  CrashWorld small{WorldOptions{.capacity_bytes = 512 * 1024}};
  const LaunchResult result = small.launch({.start = Start::kCreate});
  ASSERT_TRUE(result.error);
  EXPECT_EQ(code_of(result.error), ErrorCode::kResourceExhausted);
  EXPECT_THAT(describe(result), AllOf(HasSubstr("needed"), HasSubstr("free")));
  EXPECT_FALSE(small.disk().exists(small.temporary_path(0)));
}

TEST_F(TwoRankStoreDamage, TheFileOfAnotherRank) {
  world_.disk().copy_file(world_.path(0), world_.path(1));
  EXPECT_THAT(refused(ErrorCode::kUnavailable, 0), HasSubstr("another rank could not open"));
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument, 1),
              HasSubstr("holds the state of rank 0, not of rank 1"));
}

TEST_F(TwoRankStoreDamage, TheFileOfAnotherStore) {
  CrashWorld other{WorldOptions{.ranks = 2}};
  other.launch({.start = Start::kCreate, .steps = 3});
  world_.disk().overwrite(world_.path(1), 0, other.disk().contents(other.path(1)));
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument), HasSubstr("different stores"));
}

TEST_F(TwoRankStoreDamage, ARankRestoredFromAnOlderCopyHasNoGenerationInCommon) {
  const auto old = world_.disk().contents(world_.path(1));
  EXPECT_EQ(describe(resume(2)), "finished");
  world_.disk().overwrite(world_.path(1), 0, old);
  EXPECT_THAT(refused(ErrorCode::kDataLoss), HasSubstr("no generation is whole on every rank"));
}

TEST_F(TwoRankStoreDamage, ARankWhoseFileWentOnByItselfIsOfAnotherHistory) {
  CrashWorld other = world_;
  EXPECT_EQ(describe(other.launch({.start = Start::kResume, .steps = 1, .seed = 7})), "finished");
  EXPECT_EQ(describe(resume(1)), "finished");
  world_.disk().overwrite(world_.path(1), 0, other.disk().contents(other.path(1)));
  EXPECT_THAT(refused(ErrorCode::kDataLoss), HasSubstr("different histories"));
}

TEST_F(TwoRankStoreDamage, OneRanksDamageTakesBothRanksBack) {
  damage(layout_.table_offset[kOdd], 1);
  const LaunchResult result = resume();
  EXPECT_EQ(describe(result), "finished");
  EXPECT_EQ(result.resumed_at, 2u);
  EXPECT_THAT(result.notes[0], Contains(HasSubstr("erased")));
}

TEST_F(TwoRankStoreDamage, OneRanksWrongRecordStopsBothBeforeAnythingIsErased) {
  damage(layout_.table_offset[kOdd], 1);
  damage(layout_.record_offset(0, 2), 1);
  EXPECT_THAT(refused(ErrorCode::kDataLoss, 1), HasSubstr("Nothing was changed"));
}

// With one slot a step overwrites the only copy: a crash inside it is refused, never papered over.
TEST(StoreOneSlot, ResumesWhenItWasLeftWholeAndSaysWhatWasGivenUpOtherwise) {
  CrashWorld before{WorldOptions{.slots = 1}};
  ASSERT_EQ(describe(before.launch({.start = Start::kCreate, .steps = 2})), "finished");
  CrashWorld whole = before;
  const LaunchResult resumed = whole.launch({.start = Start::kResume, .steps = 1});
  ASSERT_EQ(describe(resumed), "finished");
  EXPECT_EQ(resumed.resumed_at, 2u);

  int lost = 0;
  int survived = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    CrashWorld world = before;
    world.launch({.start = Start::kResume,
                  .steps = 1,
                  .seed = seed,
                  .power_cut_after = 1 + seed % (resumed.events + 1)});
    world.disk().crash(seed);
    const LaunchResult back = world.launch({.start = Start::kResume, .steps = 0});
    if (!back.error) {
      ASSERT_EQ(world.fault(), "") << "seed " << seed;
      ++survived;
      continue;
    }
    ASSERT_EQ(code_of(back.error), ErrorCode::kDataLoss) << "seed " << seed << describe(back);
    ASSERT_THAT(describe(back), HasSubstr("--slots 1")) << "seed " << seed;
    ++lost;
  }
  EXPECT_GT(lost, 50);
  EXPECT_GT(survived, 50);
}

TEST(StoreOneSlot, HalvesTheRecords) {
  const CrashWorld one{WorldOptions{.slots = 1}};
  const CrashWorld two{WorldOptions{}};
  EXPECT_EQ(StateStore::file_bytes(two.spec()) - StateStore::file_bytes(one.spec()), 256u * 1024);
}

}  // namespace
}  // namespace ziggurat::faults
