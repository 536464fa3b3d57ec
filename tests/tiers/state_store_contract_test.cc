// SPDX-License-Identifier: Apache-2.0
// tests/tiers/state_store_contract_test.cc: the store as its header promises it, on a real file
// and, for failures, on a disk that fails as planned.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "aio/thread_engine.h"
#include "base/bytes.h"
#include "base/error.h"
#include "tests/support/aligned_memory.h"
#include "tiers/store/record_hash.h"
#include "tiers/store/state_store.h"
#include "tiers/store/superblock.h"

namespace ziggurat {
namespace state_store_contract_test {

using ::testing::HasSubstr;

using test::AlignedMemory;

/// A store with one user, on any engine.
class Owner {
 public:
  Owner(Reactor& reactor, IoEngine& io, std::string directory)
      : reactor_(reactor), io_(io), directory_(std::move(directory)) {
    spec.layout = "{}";
    spec.record_bytes = {kTileBytes, 3 * kTileBytes};
  }

  void create() { store = reactor_.block_on(StateStore::create(environment(), directory_, spec)); }
  void open() {
    store = reactor_.block_on(StateStore::open(environment(), directory_));
    EXPECT_TRUE(reactor_.block_on(store->settle({})));
  }
  void write(ChunkId chunk, std::uint64_t generation) {
    const AlignedMemory record(spec.record_bytes[chunk]);
    std::ranges::fill(record.bytes(), static_cast<std::byte>(16 * generation + chunk));
    const std::uint64_t hash = record_hash(record.bytes(), store->write_seed(chunk, generation));
    reactor_.block_on(store->write(chunk, generation, record.bytes(), hash));
  }
  void commit(std::uint64_t generation) {
    reactor_.block_on(store->commit(generation, blob, before_seal));
  }
  void step(std::uint64_t generation) {
    for (ChunkId chunk = 0; chunk < spec.record_bytes.size(); ++chunk) write(chunk, generation);
    commit(generation);
  }
  /// Reads, and compares hash and bytes.
  bool holds(ChunkId chunk, std::uint64_t generation) {
    return holds(chunk, generation, generation);
  }
  bool holds(ChunkId chunk, std::uint64_t generation, std::uint64_t made_in) {
    const AlignedMemory record(spec.record_bytes[chunk]);
    reactor_.block_on(store->read(chunk, generation, record.bytes()));
    const auto expected = store->expected(chunk, generation);
    return record_hash(record.bytes(), expected.seed) == expected.hash &&
           std::ranges::all_of(record.bytes(), [&](std::byte b) {
             return b == static_cast<std::byte>(16 * made_in + chunk);
           });
  }

  StoreSpec spec;
  std::vector<std::byte> blob{std::byte{7}};
  std::function<void()> before_seal;
  std::unique_ptr<StateStore> store;

 private:
  StoreEnvironment environment() {
    StoreEnvironment environment{reactor_, io_, ranks_, {}, {}, scratch_.bytes(), {}};
    environment.staging = [this](std::uint64_t size_bytes) {
      staging_.push_back(std::make_unique<AlignedMemory>(size_bytes));
      return staging_.back()->bytes();
    };
    return environment;
  }

  Reactor& reactor_;
  IoEngine& io_;
  SoloQuorum ranks_;
  std::string directory_;
  AlignedMemory scratch_{kMiB};
  std::vector<std::unique_ptr<AlignedMemory>> staging_;
};

class StateStoreOnFile : public ::testing::Test {
 protected:
  StateStoreOnFile() {
    char name[] = "./store_test_XXXXXX";
    directory_ = ::mkdtemp(name);
    owner_ = std::make_unique<Owner>(reactor_, io_, directory_);
  }
  ~StateStoreOnFile() override {
    owner_.reset();
    std::filesystem::remove_all(directory_);
  }
  std::string path() const { return directory_ + "/" + StateStore::file_name(0); }

  Reactor reactor_;
  ThreadEngine io_{reactor_};
  std::string directory_;
  std::unique_ptr<Owner> owner_;
};

TEST_F(StateStoreOnFile, IsNoStoreUntilGenerationZeroIsSealed) {
  owner_->create();
  EXPECT_FALSE(StateStore::exists(io_, directory_, 0));
  owner_->step(0);
  EXPECT_TRUE(StateStore::exists(io_, directory_, 0));
  struct stat status {};
  ASSERT_EQ(::stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), StateStore::file_bytes(owner_->spec));
  EXPECT_GE(status.st_blocks * 512, status.st_size) << "space is reserved";
}

TEST_F(StateStoreOnFile, AnUnfinishedCreationLeavesNothing) {
  owner_->create();
  owner_->store.reset();
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(StateStoreOnFile, ReplacesAnOlderStoreOnlyWhenSealed) {
  owner_->create();
  for (const std::uint64_t generation : {0, 1, 2}) owner_->step(generation);
  owner_->store.reset();
  owner_->create();
  owner_->store.reset();
  owner_->open();
  EXPECT_EQ(owner_->store->durable_generation(), 2u) << "the new one was given up: the old stays";
  owner_->store.reset();
  owner_->create();
  owner_->step(0);
  owner_->store.reset();
  owner_->open();
  EXPECT_EQ(owner_->store->durable_generation(), 0u);
}

TEST_F(StateStoreOnFile, BothGenerationsAreReadableWhileTheNextIsWritten) {
  owner_->create();
  owner_->step(0);
  owner_->write(1, 1);
  EXPECT_TRUE(owner_->holds(1, 0));
  EXPECT_TRUE(owner_->holds(1, 1));
  owner_->write(0, 1);
  bool sealed = false;
  owner_->before_seal = [&] { sealed = owner_->store->durable_generation() == 0; };
  owner_->commit(1);
  EXPECT_TRUE(sealed) << "called before the generation counts";
  owner_->store.reset();
  owner_->open();
  EXPECT_EQ(owner_->store->state().generation, 1u);
  EXPECT_EQ(owner_->store->state().blob, owner_->blob);
  EXPECT_GT(owner_->store->state().epoch, 1u);
  EXPECT_TRUE(owner_->holds(0, 1));
  EXPECT_TRUE(owner_->holds(1, 1));
}

TEST_F(StateStoreOnFile, AConstantRecordIsWrittenOnceAndIsThatOfEveryGeneration) {
  for (const std::uint32_t slots : {1u, 2u}) {
    SCOPED_TRACE(slots);
    owner_->store.reset();
    owner_->spec.slots = slots;
    owner_->spec.constant = {};
    const std::uint64_t bytes = StateStore::file_bytes(owner_->spec);
    owner_->spec.constant = {false, true};
    EXPECT_EQ(bytes - StateStore::file_bytes(owner_->spec),
              (slots - 1) * owner_->spec.record_bytes[1]);
    owner_->create();
    owner_->step(0);
    for (const std::uint64_t generation : {1, 2, 3}) {
      owner_->write(0, generation);
      owner_->commit(generation);
      EXPECT_TRUE(owner_->holds(1, generation, 0)) << "generation " << generation;
      owner_->store.reset();
      owner_->open();
      EXPECT_EQ(owner_->store->durable_generation(), generation);
      EXPECT_TRUE(owner_->holds(0, generation));
      EXPECT_TRUE(owner_->holds(1, generation, 0)) << "generation " << generation << ", opened";
    }
    EXPECT_THAT(owner_->store->corrupt_record(0, 3).what(),
                ::testing::Not(HasSubstr("belongs to every generation")));
    if (slots == 2) {
      EXPECT_THAT(owner_->store->corrupt_record(1, 3).what(),
                  HasSubstr("belongs to every generation"));
    }
  }
}

TEST_F(StateStoreOnFile, ADiscardedGenerationLeavesConstantRecordsAsTheyAre) {
  owner_->spec.constant = {false, true};
  owner_->create();
  owner_->step(0);
  owner_->write(0, 1);
  owner_->store->discard(1);
  owner_->write(0, 1);
  owner_->commit(1);
  EXPECT_TRUE(owner_->holds(0, 1));
  EXPECT_TRUE(owner_->holds(1, 1, 0));
}

TEST_F(StateStoreOnFile, OpenWaitsForTheLockOfAKilledOwner) {
  owner_->create();
  owner_->step(0);
  owner_->store.reset();
  const int other = ::open(path().c_str(), O_RDONLY);
  ASSERT_GE(other, 0);
  ASSERT_EQ(::flock(other, LOCK_EX | LOCK_NB), 0);
  std::atomic<bool> released = false;
  std::thread dying([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    released = true;
    ::close(other);
  });
  owner_->open();
  EXPECT_TRUE(released);
  dying.join();
}

TEST_F(StateStoreOnFile, CorruptRecordNamesPlaceAndWhatIsSafe) {
  owner_->create();
  owner_->step(0);
  owner_->step(1);
  const Error error = owner_->store->corrupt_record(1, 1);
  EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
  for (const char* part :
       {"rank00000", "chunk 1", "generation 1", "offset", "Generation 0 is still safe"})
    EXPECT_THAT(error.what(), HasSubstr(part));
  owner_->write(0, 2);
  EXPECT_THAT(owner_->store->corrupt_record(1, 1).what(),
              ::testing::Not(HasSubstr("Generation 0 is still safe")));
}

TEST_F(StateStoreOnFile, BadSpecificationsAreRefused) {
  owner_->spec.record_bytes = {1000};
  EXPECT_THROW(owner_->create(), Error);
  owner_->spec.record_bytes = {kTileBytes};
  owner_->spec.slots = 3;
  EXPECT_THROW(owner_->create(), Error);
}

TEST_F(StateStoreOnFile, ABlobThatIsTooLongIsRefusedAndMayBeShortened) {
  owner_->create();
  owner_->write(0, 0);
  owner_->write(1, 0);
  owner_->blob.resize(owner_->spec.blob_capacity_bytes + 1);
  EXPECT_THROW(owner_->commit(0), Error);
  owner_->blob.resize(5);
  owner_->commit(0);
}

class StateStoreDeath : public ::testing::Test {
 protected:
  StateStoreDeath() {
    ::testing::FLAGS_gtest_death_test_style = "fast";
    owner_.create();
    owner_.step(0);
  }
  Reactor reactor_{Clock::Kind::kVirtual};
  SimulatedDisk disk_;
  FaultyEngine io_{reactor_, std::make_unique<SimulatedEngine>(reactor_, disk_)};
  Owner owner_{reactor_, io_, "/store"};
};

TEST_F(StateStoreDeath, NoGenerationIsSkippedOrWrittenTwice) {
  EXPECT_DEATH(owner_.write(0, 2), "may not be written, 1 is next");
  EXPECT_DEATH(owner_.write(0, 0), "may not be written, 1 is next");
  EXPECT_DEATH(owner_.commit(2), "cannot be sealed, 1 is next");
}

TEST_F(StateStoreDeath, AGenerationIsSealedOnlyWithAllItsRecords) {
  owner_.write(0, 1);
  EXPECT_DEATH(owner_.commit(1), "chunk 1 holds");
  EXPECT_DEATH(owner_.holds(1, 1), "generation 1 asked for");
}

TEST_F(StateStoreDeath, AConstantRecordIsNotWrittenAgain) {
  owner_.store.reset();
  owner_.spec.constant = {false, true};
  owner_.create();
  owner_.step(0);
  EXPECT_DEATH(owner_.write(1, 1), "chunk 1 is constant");
}

TEST_F(StateStoreDeath, ADiscardedGenerationIsSealedOnlyWhenAllIsWrittenAnew) {
  const std::uint64_t guessed = owner_.store->write_seed(0, 1);
  const std::uint64_t later = owner_.store->write_seed(0, 2);
  owner_.write(0, 1);
  owner_.store->discard(1);
  EXPECT_NE(owner_.store->write_seed(0, 1), guessed) << "what was discarded never verifies";
  EXPECT_EQ(owner_.store->write_seed(0, 2), later) << "and nothing of a later generation was";
  EXPECT_DEATH(owner_.holds(0, 1), "generation 1 asked for");
  EXPECT_TRUE(owner_.holds(0, 0)) << "the generation before is as it was";
  owner_.write(1, 1);
  EXPECT_DEATH(owner_.commit(1), "chunk 0 holds");
  owner_.write(0, 1);
  owner_.commit(1);
  owner_.store.reset();
  owner_.open();
  EXPECT_EQ(owner_.store->durable_generation(), 1u);
  EXPECT_TRUE(owner_.holds(0, 1) && owner_.holds(1, 1));
}

TEST_F(StateStoreDeath, TwoWritesOfOneRecordFollowEachOther) {
  const AlignedMemory record(owner_.spec.record_bytes[0]);
  std::ranges::fill(record.bytes(), std::byte{16});
  const auto hash = [&] { return record_hash(record.bytes(), owner_.store->write_seed(0, 1)); };
  WorkGroup writes(reactor_);
  writes.spawn(owner_.store->write(0, 1, record.bytes(), hash()));
  // Once it is submitted: its coroutine has started and waits for the disk.
  reactor_.block_on([](Reactor& reactor) -> Task<> {
    Signal later(reactor);
    reactor.clock().after(Nanoseconds{1}, [&later] { later.set(); });
    co_await later.wait();
  }(reactor_));
  owner_.store->discard(1);
  EXPECT_DEATH(owner_.write(0, 1), "a second write of it was begun");
  reactor_.run_until_idle();
  EXPECT_DEATH(owner_.holds(0, 1), "generation 1 asked for") << "it ended after it was discarded";
  owner_.write(0, 1);
  EXPECT_TRUE(owner_.holds(0, 1));
}

TEST_F(StateStoreDeath, WhatIsSealedOrHasOneSlotCannotBeDiscarded) {
  EXPECT_DEATH(owner_.store->discard(0), "cannot be discarded, 1 is next");
  owner_.store.reset();
  owner_.spec.slots = 1;
  owner_.create();
  owner_.step(0);
  EXPECT_DEATH(owner_.store->discard(1), "written over the previous one");
}

TEST_F(StateStoreDeath, AFailedSyncIsNeverTriedAgain) {
  owner_.write(0, 1);
  owner_.write(1, 1);
  io_.plan(Fault::fail(FaultPoint::kSync, EIO).at(io_.calls(FaultPoint::kSync)));
  EXPECT_THROW(owner_.commit(1), Error);
  EXPECT_THROW(owner_.commit(1), Error) << "what the failed one dropped is gone";
  EXPECT_EQ(owner_.store->durable_generation(), 0u);
  owner_.store.reset();
  io_.clear_plan();
  owner_.open();
  EXPECT_EQ(owner_.store->durable_generation(), 0u);
  EXPECT_TRUE(owner_.holds(0, 0));
}

/// By who copies the generation that is durable, while the next is sealed.
TEST_F(StateStoreDeath, AConstantRecordInItsOnlySlotCanBeReadAtAnyTime) {
  owner_.store.reset();
  owner_.spec.slots = 1;
  owner_.spec.constant = {true, false};
  owner_.create();
  owner_.step(0);
  owner_.write(1, 1);
  StateStore::Expected expected{};
  owner_.before_seal = [&] { expected = owner_.store->expected(0, 0); };
  owner_.commit(1);
  EXPECT_EQ(expected.hash, owner_.store->expected(0, 1).hash);
}

/// Whatever number a caller thinks is next: what the drive has is looked at first.
TEST_F(StateStoreDeath, AfterAFailedSyncEveryWriteSaysWhatThatMeans) {
  owner_.write(0, 1);
  owner_.write(1, 1);
  io_.plan(Fault::fail(FaultPoint::kSync, EIO).at(io_.calls(FaultPoint::kSync)));
  EXPECT_THROW(owner_.commit(1), Error);
  for (const std::uint64_t generation : {1, 2}) {
    try {
      owner_.write(0, generation);
      ADD_FAILURE() << "generation " << generation;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), HasSubstr("nothing is written to this store any more"));
      EXPECT_THAT(error.what(), HasSubstr("Generation 0 is durable"));
    }
    EXPECT_THROW(owner_.commit(generation), Error);
  }
}

TEST_F(StateStoreDeath, AFullDiskInACommitLosesNothingAndTheCommitMayBeRepeated) {
  owner_.write(0, 1);
  owner_.write(1, 1);
  io_.plan(Fault::fail(FaultPoint::kWrite, ENOSPC).at(io_.calls(FaultPoint::kWrite)));
  EXPECT_THROW(owner_.commit(1), Error) << "of its table";
  EXPECT_EQ(owner_.store->durable_generation(), 0u);
  owner_.write(0, 1);  // another value, perhaps
  owner_.commit(1);
  owner_.step(2);
  owner_.store.reset();
  owner_.open();
  EXPECT_EQ(owner_.store->durable_generation(), 2u);
  EXPECT_TRUE(owner_.holds(0, 2) && owner_.holds(1, 2));
}

TEST_F(StateStoreDeath, AFailedRecordWriteIsReportedAndMayBeRepeated) {
  io_.plan(Fault::fail(FaultPoint::kWrite, ENOSPC).at(io_.calls(FaultPoint::kWrite)));
  EXPECT_THROW(owner_.write(0, 1), Error);
  EXPECT_DEATH(owner_.commit(1), "chunk 0 holds");
  owner_.step(1);
  EXPECT_EQ(owner_.store->durable_generation(), 1u);
}

TEST_F(StateStoreDeath, EveryFailureOfACommitIsReportedAndLosesNothing) {
  for (const FaultPoint point : {FaultPoint::kWrite, FaultPoint::kSync}) {
    for (std::uint64_t nth = 0;; ++nth) {
      const std::uint64_t next = owner_.store->durable_generation() + 1;
      owner_.write(0, next);
      owner_.write(1, next);
      const std::uint64_t struck = io_.injected(point);
      io_.plan(Fault::fail(point, EIO).at(io_.calls(point) + nth));
      bool failed = false;
      try {
        owner_.commit(next);
      } catch (const Error&) {
        failed = true;
      }
      io_.clear_plan();
      ASSERT_EQ(failed, io_.injected(point) > struck) << "call " << nth;
      owner_.store.reset();
      owner_.open();
      const std::uint64_t found = owner_.store->durable_generation();
      ASSERT_TRUE(found == next || (failed && found == next - 1)) << "call " << nth;
      ASSERT_TRUE(owner_.holds(0, found) && owner_.holds(1, found));
      if (!failed) break;
    }
  }
}

TEST(Superblock, EveryBitCounts) {
  Superblock superblock;
  superblock.generation = 7;
  superblock.lineage = ~0ull;
  superblock.in_progress = true;
  std::vector<std::byte> block(kSuperblockBytes);
  encode_superblock(superblock, block);
  Superblock read;
  ASSERT_EQ(decode_superblock(block, read), SuperblockVerdict::kValid);
  EXPECT_EQ(superblock_hash(read), superblock_hash(superblock));
  EXPECT_TRUE(read.in_progress);
  for (std::size_t bit = 0; bit < 8 * block.size(); ++bit) {
    block[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_NE(decode_superblock(block, read), SuperblockVerdict::kValid) << "bit " << bit;
    block[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(RecordHash, IsTheHashOfItsTilesInOrderUnderTheSeed) {
  std::vector<std::byte> record(3 * kTileBytes);
  for (std::size_t i = 0; i < record.size(); ++i) record[i] = static_cast<std::byte>(i / 1000);
  RecordHash tiles({}, record.size());
  for (const std::size_t tile : {2, 0, 1})
    tiles.add(tile * kTileBytes, std::span(record).subspan(tile * kTileBytes, kTileBytes));
  EXPECT_EQ(tiles.finish(5), record_hash(record, 5));
  EXPECT_NE(tiles.finish(6), record_hash(record, 5));
  std::swap_ranges(record.begin(), record.begin() + kTileBytes, record.begin() + kTileBytes);
  EXPECT_NE(tiles.finish(5), record_hash(record, 5)) << "order matters";
}

}  // namespace state_store_contract_test
}  // namespace ziggurat
