// SPDX-License-Identifier: Apache-2.0
// tests/faults/store_damage_test.cc: what the store does when the drive, or somebody, has changed
// its file: it opens whatever it can still prove, says what was lost, and otherwise refuses without
// changing anything.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/faults/crash_world.h"
#include "tests/support/store_file.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/superblock.h"

namespace ziggurat::faults {
namespace {

using Start = Launch::Start;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr unsigned kOdd = 1;  // a store trained for three steps: generation 3 is odd, 2 is even
constexpr unsigned kEven = 0;

struct RecordPlace {
  std::string path;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
};

RecordPlace place_of_record(CrashWorld& world, int rank, ChunkId chunk, std::uint64_t generation,
                            int stripes = 1) {
  for (int stripe = 0; stripe < stripes; ++stripe) {
    const std::string path = world.path(rank, static_cast<std::uint32_t>(stripe));
    const auto file = test::StoreFile::of(world.disk().contents(path).all());
    const auto local = file ? file->find(chunk) : std::nullopt;
    if (local)
      return {path, file->layout.record_offset(*local, generation),
              file->layout.record_bytes[*local]};
  }
  ADD_FAILURE() << "chunk " << chunk << " of rank " << rank << " is nowhere";
  return {};
}

std::vector<std::byte> bytes_at(CrashWorld& world, const RecordPlace& place) {
  const auto all = world.disk().contents(place.path).all();
  const auto record = std::span(all).subspan(place.offset_bytes, place.size_bytes);
  return {record.begin(), record.end()};
}

class StoreDamage : public testing::Test {
 protected:
  StoreDamage() : StoreDamage(WorldOptions{}) {}
  explicit StoreDamage(WorldOptions options) : world_(std::move(options)) {
    EXPECT_EQ(describe(world_.launch({.start = Start::kCreate, .steps = 3})), "finished");
    layout_ = StoreLayout::of(world_.spec(), store_text(world_.spec()).size());
  }

  /// Turns over every bit of the 512 bytes at `offset`.
  void damage(std::uint64_t offset, int rank = 0) {
    auto bytes = world_.disk().contents(world_.path(rank)).all();
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
    const PagedBytes before = world_.disk().contents(world_.path(0));
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

class LyingStoreDamage : public StoreDamage {
 protected:
  LyingStoreDamage() : StoreDamage(WorldOptions{.lying_drives = true}) {}
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
  EXPECT_THAT(result.notes[0], Contains(HasSubstr("no copy is whole")));
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
                    HasSubstr("are not touched")));
}

TEST_F(StoreDamage, ADamagedTableOrBlobTakesItsGenerationWithIt) {
  for (const bool table : {true, false}) {
    CrashWorld saved = world_;
    damage(table ? layout_.table_offset[kOdd] : layout_.blob_offset[kOdd]);
    const LaunchResult result = resume();
    EXPECT_EQ(describe(result), "finished");
    EXPECT_EQ(result.resumed_at, 2u);
    EXPECT_THAT(result.notes[0], Contains(HasSubstr(table ? "checksum table" : "blob")));
    EXPECT_THAT(result.notes[0],
                Contains(HasSubstr("fell back from generation 3 to generation 2")));
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
  EXPECT_THAT(result.notes[0], Contains(HasSubstr("fell back from generation 3 to generation 2")));
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

TEST_F(StoreDamage, AStoreThatIsNotThere) {
  CrashWorld empty{WorldOptions{}};
  const LaunchResult result = empty.launch({.start = Start::kResume});
  ASSERT_TRUE(result.error);
  EXPECT_EQ(code_of(result.error), ErrorCode::kInvalidArgument);
  EXPECT_THAT(describe(result), HasSubstr("there is no store at"));
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
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument), HasSubstr("store format version 2"));
}

TEST_F(StoreDamage, AnotherWorldSize) {
  CrashWorld pair{WorldOptions{.ranks = 2}};
  pair.launch({.start = Start::kCreate, .steps = 1});
  world_.disk() = pair.disk();
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument),
              HasSubstr("the store was made by 2 ranks, but is opened by 1"));
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
  world_.disk().overwrite(world_.path(1), 0, other.disk().contents(other.path(1)).all());
  EXPECT_THAT(refused(ErrorCode::kInvalidArgument), HasSubstr("different stores"));
}

TEST_F(TwoRankStoreDamage, ARankRestoredFromAnOlderCopyHasNoGenerationInCommon) {
  const auto old = world_.disk().contents(world_.path(1)).all();
  EXPECT_EQ(describe(resume(2)), "finished");
  world_.disk().overwrite(world_.path(1), 0, old);
  EXPECT_THAT(refused(ErrorCode::kDataLoss), HasSubstr("no generation is whole on every rank"));
}

// They differ at generation 4, so they are compared at 3, which both were made from.
TEST_F(TwoRankStoreDamage, ARankWhoseFileWentOnByItselfGoesBackToWhereTheHistoriesPart) {
  CrashWorld other = world_;
  EXPECT_EQ(describe(other.launch({.start = Start::kResume, .steps = 1, .seed = 7})), "finished");
  EXPECT_EQ(describe(resume(1)), "finished");
  world_.disk().overwrite(world_.path(1), 0, other.disk().contents(other.path(1)).all());
  const LaunchResult result = resume();
  EXPECT_EQ(describe(result), "finished");
  EXPECT_EQ(result.resumed_at, 3u);
  for (const auto& notes : result.notes) {
    EXPECT_THAT(notes, Contains(HasSubstr("generation 4 has different histories")));
    EXPECT_THAT(notes, Contains(HasSubstr("fell back from generation 4 to generation 3")));
  }
}

TEST_F(TwoRankStoreDamage, HistoriesThatPartedTwoGenerationsAgoHaveNothingInCommon) {
  CrashWorld other = world_;
  EXPECT_EQ(describe(other.launch({.start = Start::kResume, .steps = 2, .seed = 7})), "finished");
  EXPECT_EQ(describe(resume(2)), "finished");
  world_.disk().overwrite(world_.path(1), 0, other.disk().contents(other.path(1)).all());
  EXPECT_THAT(refused(ErrorCode::kDataLoss),
              AllOf(HasSubstr("generation 5 has different histories"),
                    HasSubstr("generation 4 has different histories")));
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

struct RecordCase {
  int ranks;
  int stripes;
  const char* damage;  ///< flipped, stale, another's, unreadable
};

/// A store of generation 3 and, in the other slots, 2.
class EveryRecord : public testing::TestWithParam<RecordCase> {
 protected:
  static constexpr int kChunks = 3;

  EveryRecord() {
    EXPECT_EQ(describe(world_.launch({.start = Start::kCreate, .steps = 1})), "finished");
    old_ = std::make_unique<CrashWorld>(world_);
    EXPECT_EQ(describe(world_.launch({.start = Start::kResume, .steps = 2, .seed = 2})),
              "finished");
  }

  RecordPlace place(CrashWorld& world, int rank, ChunkId chunk, std::uint64_t generation) const {
    return place_of_record(world, rank, chunk, generation, GetParam().stripes);
  }

  void damage(CrashWorld& world, int rank, ChunkId chunk, std::uint64_t generation) {
    const RecordPlace where = place(world, rank, chunk, generation);
    const std::string kind = GetParam().damage;
    if (kind == "unreadable") {
      world.disk().make_unreadable(where.path, where.offset_bytes + 1024, 512);
      return;
    }
    std::vector<std::byte> bytes = bytes_at(world, where);
    if (kind == "flipped") bytes[bytes.size() / 2] ^= std::byte{4};
    if (kind == "stale")  // of two generations before: the drive lost the write of this one
      bytes = bytes_at(*old_, place(*old_, rank, chunk, generation));
    if (kind == "another's") {  // a write to another record came here
      const ChunkId other = (chunk + 1) % kChunks;
      const auto foreign = bytes_at(world, place(world, rank, other, generation));
      std::copy_n(foreign.begin(), std::min(foreign.size(), bytes.size()), bytes.begin());
    }
    world.disk().overwrite(where.path, where.offset_bytes, bytes);
  }

  WorldOptions options() const {
    return {.ranks = GetParam().ranks, .stripes = GetParam().stripes, .lying_drives = true};
  }
  CrashWorld world_{options()};
  std::unique_ptr<CrashWorld> old_;
};

TEST_P(EveryRecord, DamagedInTheNewestGenerationTakesAllBackToTheOneBefore) {
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    for (ChunkId chunk = 0; chunk < kChunks; ++chunk) {
      SCOPED_TRACE(fmt::format("rank {} chunk {}", rank, chunk));
      CrashWorld world = world_;
      damage(world, rank, chunk, 3);
      const LaunchResult result = world.launch({.start = Start::kResume, .steps = 1});
      ASSERT_EQ(world.fault(), "");
      ASSERT_EQ(describe(result), "finished");
      EXPECT_EQ(result.resumed_at, 2u);
      for (int each = 0; each < GetParam().ranks; ++each) {
        const auto& notes = result.notes[static_cast<std::size_t>(each)];
        EXPECT_THAT(notes,
                    Contains(HasSubstr("fell back from generation 3 to generation 2")).Times(1));
        const auto lost =
            AllOf(HasSubstr("generation 3 is damaged"), HasSubstr(fmt::format("chunk {} ", chunk)));
        EXPECT_THAT(notes, Contains(lost).Times(each == rank ? 1 : 0));
      }
      const LaunchResult next = world.launch({.start = Start::kResume, .steps = 1, .seed = 5});
      EXPECT_EQ(describe(next), "finished");
      EXPECT_EQ(next.resumed_at, 3u) << "made again";
      for (const auto& notes : next.notes) EXPECT_THAT(notes, IsEmpty());
      EXPECT_EQ(world.fault(), "");
    }
  }
}

TEST_P(EveryRecord, DamagedInBothGenerationsIsRefusedAndNamed) {
  const int last = GetParam().ranks - 1;
  damage(world_, 0, 0, 3);
  damage(world_, last, 2, 2);
  const LaunchResult result = world_.launch({.start = Start::kResume});
  ASSERT_TRUE(result.error);
  for (const auto& error : result.errors) EXPECT_TRUE(error) << "every rank stops";
  EXPECT_EQ(world_.fault(), "") << "and nothing was changed";
  const auto said = [&](int rank) {
    LaunchResult its;
    its.error = result.errors[static_cast<std::size_t>(rank)];
    return describe(its);
  };
  EXPECT_EQ(code_of(result.errors[0]), ErrorCode::kDataLoss);
  EXPECT_THAT(said(0), HasSubstr("no generation is whole"));
  if (GetParam().stripes == 1) {
    EXPECT_THAT(said(0), HasSubstr("generation 3 is damaged in 1 of 3 records"));
    EXPECT_THAT(said(last), HasSubstr("generation 2 is damaged in 1 of 3 records"));
  }
}

class WayBack : public EveryRecord {};

// Whatever instant of the way back the machine dies at, the way is the same again.
TEST_P(WayBack, KilledAtAnyEventIsTakenAgain) {
  damage(world_, GetParam().ranks - 1, 1, 3);
  CrashWorld undisturbed = world_;
  const Launch launch{.start = Start::kResume, .steps = 0};
  const std::uint64_t events = undisturbed.launch(launch).events;
  ASSERT_EQ(undisturbed.fault(), "");
  for (std::uint64_t cut = 1; cut <= events; ++cut) {
    for (const bool power : {true, false}) {
      CrashWorld world = world_;
      world.launch({.start = Start::kResume, .steps = 0, .seed = cut, .power_cut_after = cut});
      if (power) {
        world.disk().crash(cut);
      } else {
        world.disk().kill(cut);
      }
      const LaunchResult back =
          world.launch({.start = Start::kResume, .steps = 1, .seed = cut + 1});
      ASSERT_EQ(world.fault(), "") << "event " << cut << " of " << events;
      ASSERT_EQ(describe(back), "finished") << "event " << cut << " of " << events;
      ASSERT_EQ(back.resumed_at, 2u) << "event " << cut << " of " << events;
    }
  }
}

std::vector<RecordCase> record_cases() {
  std::vector<RecordCase> cases;
  for (const int ranks : {1, 2}) {
    for (const int stripes : {1, 3}) {
      for (const char* damage : {"flipped", "stale", "another's", "unreadable"})
        cases.push_back({ranks, stripes, damage});
    }
  }
  return cases;
}

std::string name_of(const testing::TestParamInfo<RecordCase>& one) {
  std::string damage = one.param.damage;
  std::erase(damage, '\'');
  return fmt::format("{}Ranks{}Stripes{}", one.param.ranks, one.param.stripes, damage);
}
INSTANTIATE_TEST_SUITE_P(Store, EveryRecord, testing::ValuesIn(record_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Store, WayBack,
                         testing::Values(RecordCase{1, 1, "flipped"},
                                         RecordCase{1, 1, "unreadable"}, RecordCase{1, 3, "stale"},
                                         RecordCase{2, 1, "flipped"},
                                         RecordCase{2, 3, "unreadable"}),
                         name_of);

// A drive that misdirects writes may put another file's superblock in this one.
TEST_F(TwoRankStoreDamage, ASuperblockOfAnotherRankIsNotTakenForThisOnes) {
  const auto theirs = world_.disk().contents(world_.path(1)).all();
  for (const unsigned parity : {kOdd, kEven}) {
    const std::uint64_t at = StoreLayout::superblock_offset(parity, 0, layout_.file_bytes);
    world_.disk().overwrite(world_.path(0), at, std::span(theirs).subspan(at, kSuperblockBytes));
  }
  const LaunchResult result = resume();
  EXPECT_EQ(describe(result), "finished");
  EXPECT_EQ(result.resumed_at, 3u);
  EXPECT_THAT(result.notes[0], Contains(AllOf(HasSubstr("superblock odd, first copy"),
                                              HasSubstr("another file"), HasSubstr("rank 1"))));
  EXPECT_THAT(resume().notes[0], IsEmpty()) << "it was repaired";
}

// One copy still says the generation before the last but one: its last write was lost.
TEST_F(StoreDamage, AStaleCopyOfASuperblockDoesNotHideTheOther) {
  CrashWorld before = world_;
  EXPECT_EQ(describe(resume(2)), "finished");
  const auto old = before.disk().contents(world_.path(0)).all();
  for (const int copy : {0, 1}) {
    CrashWorld world = world_;
    const std::uint64_t at = StoreLayout::superblock_offset(kOdd, copy, layout_.file_bytes);
    world.disk().overwrite(world.path(0), at, std::span(old).subspan(at, kSuperblockBytes));
    const LaunchResult result = world.launch({.start = Start::kResume});
    EXPECT_EQ(describe(result), "finished");
    EXPECT_EQ(result.resumed_at, 5u);
    EXPECT_EQ(world.fault(), "");
  }
}

// A drive may lose the writes of superblock and table, and keep those of the records: what is
// sealed is then another history's than what it seals, and no generation, however whole each is.
TEST_F(LyingStoreDamage, RecordsOfOneHistoryUnderTheSealOfAnotherAreNoGeneration) {
  CrashWorld other = world_;
  EXPECT_EQ(describe(other.launch({.start = Start::kResume, .steps = 0})), "finished");
  EXPECT_EQ(describe(other.launch({.start = Start::kResume, .steps = 1})), "finished");
  EXPECT_EQ(describe(resume(1)), "finished");
  const auto theirs = other.disk().contents(world_.path(0)).all();
  const CrashWorld before = world_;
  for (const bool blob_too : {false, true}) {
    CrashWorld world = before;
    const auto take = [&](std::uint64_t offset, std::uint64_t size_bytes) {
      world.disk().overwrite(world.path(0), offset, std::span(theirs).subspan(offset, size_bytes));
    };
    for (const int copy : {0, 1})
      take(StoreLayout::superblock_offset(kEven, copy, layout_.file_bytes), kSuperblockBytes);
    take(layout_.table_offset[kEven], layout_.table_region_bytes);
    if (blob_too) take(layout_.blob_offset[kEven], layout_.blob_region_bytes);
    const LaunchResult result = world.launch({.start = Start::kResume, .steps = 1});
    EXPECT_EQ(world.fault(), "");
    EXPECT_EQ(describe(result), "finished");
    EXPECT_EQ(result.resumed_at, 3u);
    EXPECT_THAT(
        result.notes[0],
        Contains(HasSubstr(
            blob_too ? "generation 4 is damaged in 3 of 3 records"
                     : "generation 4 cannot be used, because the trainer blob is damaged")));
  }
}

// The table and the blob of generation g + 1 are written before its superblock, over those of
// g - 1. A kill in between is nothing to speak of.
TEST_F(StoreDamage, ACommitCutOffBeforeItsSuperblockIsNotCalledDamage) {
  CrashWorld before = world_;
  const std::uint64_t events = before.launch({.start = Start::kResume, .steps = 1}).events;
  int between = 0;
  for (std::uint64_t cut = 1; cut <= events; ++cut) {
    CrashWorld world = world_;
    world.launch({.start = Start::kResume, .steps = 1, .power_cut_after = cut});
    world.disk().kill(cut);
    const auto bytes = world.disk().contents(world.path(0)).all();
    const auto unlike = [&](std::uint64_t offset) {
      const auto whole = world_.disk().contents(world.path(0)).all();
      return std::memcmp(bytes.data() + offset, whole.data() + offset, kSuperblockBytes) != 0;
    };
    const LaunchResult back = world.launch({.start = Start::kResume, .steps = 0});
    ASSERT_EQ(world.fault(), "");
    if (!unlike(layout_.table_offset[kEven]) || back.resumed_at != 3) continue;
    ++between;
    EXPECT_THAT(back.notes[0], IsEmpty()) << "event " << cut;
  }
  EXPECT_GT(between, 2);
}

// After a failed fdatasync the page cache shows as written what the drive never got. A run that
// believed it would overwrite the generation before, which is all that there is.
TEST(StoreSync, WhatAFailedSyncLeftInThePageCacheIsNotBelieved) {
  CrashWorld before{WorldOptions{}};
  ASSERT_EQ(describe(before.launch({.start = Start::kCreate, .steps = 1})), "finished");
  CrashWorld counted = before;
  const std::uint64_t events =
      counted.launch({.start = Start::kResume, .steps = 1, .seed = 3}).events;
  for (const std::uint64_t failing : {1u, 2u}) {  // before and after the superblock of generation 2
    for (std::uint64_t cut = 1; cut <= events; ++cut) {
      CrashWorld world = before;
      const LaunchResult failed = world.launch(
          {.start = Start::kResume, .steps = 1, .sync_fails = [failing](std::uint64_t sync) {
             return sync == failing;
           }});
      ASSERT_TRUE(failed.error);
      world.disk().kill(cut);
      world.launch({.start = Start::kResume, .steps = 1, .seed = 3, .power_cut_after = cut});
      world.disk().crash(cut);
      const LaunchResult back = world.launch({.start = Start::kResume, .steps = 0});
      ASSERT_EQ(world.fault(), "") << "sync " << failing << ", event " << cut;
      ASSERT_EQ(describe(back), "finished") << "sync " << failing << ", event " << cut;
    }
  }
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
    ASSERT_THAT(describe(back), HasSubstr("slots=1")) << "seed " << seed;
    ++lost;
  }
  EXPECT_GT(lost, 50);
  EXPECT_GT(survived, 50);
}

TEST(StoreOneSlot, ADamagedRecordSaysWhatIsLostAndThatThereIsNoWayBack) {
  CrashWorld world{WorldOptions{.slots = 1, .lying_drives = true}};
  ASSERT_EQ(describe(world.launch({.start = Start::kCreate, .steps = 3})), "finished");
  const RecordPlace place = place_of_record(world, 0, 1, 3);
  world.disk().make_unreadable(place.path, place.offset_bytes, 512);
  const LaunchResult result = world.launch({.start = Start::kResume});
  ASSERT_TRUE(result.error);
  EXPECT_EQ(code_of(result.error), ErrorCode::kDataLoss);
  EXPECT_THAT(describe(result), AllOf(HasSubstr(place.path), HasSubstr("generation 3 is damaged"),
                                      HasSubstr("chunk 1"), HasSubstr("EIO"), HasSubstr("slots=1"),
                                      HasSubstr("the store has no older generation"),
                                      HasSubstr("Nothing was changed")));
  EXPECT_EQ(world.fault(), "");
}

TEST(StoreOneSlot, HalvesTheRecords) {
  const CrashWorld one{WorldOptions{.slots = 1}};
  const CrashWorld two{WorldOptions{}};
  EXPECT_EQ(StateStore::file_bytes(two.spec()) - StateStore::file_bytes(one.spec()), 256u * 1024);
}

}  // namespace
}  // namespace ziggurat::faults
