// SPDX-License-Identifier: Apache-2.0
// tests/tiers/striped_store_test.cc: several drives as one store: how chunks are spread, what two
// unequal drives give together, and what happens when their directories are mixed up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>

#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "base/bytes.h"
#include "tests/support/aligned_memory.h"
#include "tiers/store/record_hash.h"
#include "tiers/store/striped_store.h"

namespace ziggurat {
namespace striped_store_test {

using ::testing::HasSubstr;

using test::AlignedMemory;

/// Drives in virtual time, each with one directory.
class Drives : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kRecordBytes = kMiB;

  StripePlace& add(const std::string& directory, double bytes_per_second, std::uint64_t weight) {
    SimulatedEngineOptions options;
    options.read_bytes_per_second = options.write_bytes_per_second = bytes_per_second;
    options.latency = std::chrono::microseconds(80);
    engines_.push_back(std::make_unique<SimulatedEngine>(reactor_, disk_, std::move(options)));
    places_.push_back(
        {.io = *engines_.back(), .observers = {}, .directory = directory, .weight = weight});
    return places_.back();
  }

  StripedStore::Environment environment() {
    scratch_ = std::make_unique<AlignedMemory>(StripedStore::scratch_bytes(places_.size()));
    return {.reactor = reactor_,
            .ranks = ranks_,
            .places = places_,
            .staging =
                [this](std::uint64_t size_bytes) {
                  staging_.push_back(std::make_unique<AlignedMemory>(size_bytes));
                  return staging_.back()->bytes();
                },
            .scratch = scratch_->bytes()};
  }

  std::unique_ptr<StripedStore> create(std::size_t chunks) {
    StoreSpec spec;
    spec.layout = "{}";
    spec.record_bytes.assign(chunks, kRecordBytes);
    spec.blob_capacity_bytes = 4096;
    auto store = reactor_.block_on(StripedStore::create(environment(), std::move(spec)));
    reactor_.block_on(sweep(*store, 0));
    return store;
  }

  std::unique_ptr<StripedStore> open() {
    auto store = reactor_.block_on(StripedStore::open(environment()));
    EXPECT_TRUE(reactor_.block_on(store->settle({})));
    return store;
  }

  Task<> write(StripedStore& store, ChunkId chunk, std::uint64_t generation) {
    const AlignedMemory record(kRecordBytes);
    std::ranges::fill(record.bytes(), static_cast<std::byte>(chunk * 7 + generation + 1));
    const std::uint64_t hash = record_hash(record.bytes(), store.write_seed(chunk, generation));
    co_await store.write(chunk, generation, record.bytes(), hash);
  }

  Task<> sweep(StripedStore& store, std::uint64_t generation) {
    WorkGroup writes(reactor_);
    for (ChunkId chunk = 0; chunk < store.chunk_count(); ++chunk)
      writes.spawn(write(store, chunk, generation));
    co_await writes.wait_idle();
    const std::function<void()> nothing;
    co_await store.commit(generation, {}, nothing);
  }

  Task<> read(StripedStore& store, ChunkId chunk, std::uint64_t generation) {
    const AlignedMemory record(kRecordBytes);
    co_await store.read(chunk, generation, record.bytes());
    const auto expected = store.expected(chunk, generation);
    EXPECT_EQ(record_hash(record.bytes(), expected.seed), expected.hash) << "chunk " << chunk;
    EXPECT_EQ(record.bytes()[100], static_cast<std::byte>(chunk * 7 + generation + 1));
  }

  Task<> read_all(StripedStore& store, std::uint64_t generation) {
    WorkGroup reads(reactor_);
    for (ChunkId chunk = 0; chunk < store.chunk_count(); ++chunk)
      reads.spawn(read(store, chunk, generation));
    co_await reads.wait_idle();
  }

  /// Bytes a second of `task`, which moves every record once, in virtual time.
  double rate(const StripedStore& store, Task<> task) {
    const Nanoseconds begin = reactor_.clock().now();
    reactor_.block_on(std::move(task));
    const double seconds = std::chrono::duration<double>(reactor_.clock().now() - begin).count();
    return static_cast<double>(store.chunk_count() * kRecordBytes) / seconds;
  }

  std::string error_of_open() {
    try {
      open();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  SimulatedDisk disk_;
  SoloQuorum ranks_;
  std::vector<std::unique_ptr<SimulatedEngine>> engines_;
  std::vector<StripePlace> places_;
  std::vector<std::unique_ptr<AlignedMemory>> staging_;
  std::unique_ptr<AlignedMemory> scratch_;
};

TEST_F(Drives, ChunksAreSpreadByWeightAndSoIsEveryStretchOfThem) {
  add("/a", 7e9, 7);
  add("/b", 3e9, 3);
  const std::vector<std::uint64_t> bytes(1000, kRecordBytes);
  const auto stripes = assign_stripes(bytes, places_);
  EXPECT_EQ(std::accumulate(stripes.begin(), stripes.end(), 0U), 300U);
  for (std::size_t begin = 0; begin + 100 <= stripes.size(); begin += 17) {
    const auto ones = std::count(stripes.begin() + static_cast<std::ptrdiff_t>(begin),
                                 stripes.begin() + static_cast<std::ptrdiff_t>(begin + 100), 1U);
    EXPECT_NEAR(static_cast<double>(ones), 30, 1) << begin;
  }
}

TEST_F(Drives, UnequalRecordsAreSpreadByTheirBytes) {
  add("/a", 1e9, 1);
  add("/b", 1e9, 1);
  const std::vector<std::uint64_t> bytes{8 * kMiB, kMiB, kMiB, kMiB, kMiB, kMiB,
                                         kMiB,     kMiB, kMiB, kMiB, kMiB};
  const auto stripes = assign_stripes(bytes, places_);
  std::array<std::uint64_t, 2> sums{};
  for (std::size_t i = 0; i < bytes.size(); ++i) sums[stripes[i]] += bytes[i];
  EXPECT_EQ(sums[0], sums[1]);
}

TEST_F(Drives, AStripeThatWouldHoldNothingIsNamed) {
  add("/a", 1e9, 100);
  add("/b", 1e9, 1);
  const std::vector<std::uint64_t> bytes(3, kRecordBytes);
  try {
    assign_stripes(bytes, places_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("/b"));
  }
}

// 10 GB/s are there; what is missing is the end of a sweep, when one drive is done first, and
// latency.
TEST_F(Drives, OfSevenAndThreeGigabytesASecondGiveNinePointFiveTogether) {
  add("/fast", 7e9, 7);
  add("/slow", 3e9, 3);
  const auto store = create(400);
  EXPECT_GE(rate(*store, read_all(*store, 0)), 9.5e9);
  EXPECT_GE(rate(*store, sweep(*store, 1)), 9.5e9);
}

TEST_F(Drives, OpenInAnyOrderOfTheirDirectories) {
  add("/a", 1e9, 2);
  add("/b", 1e9, 1);
  add("/c", 1e9, 1);
  {
    const auto store = create(16);
    reactor_.block_on(sweep(*store, 1));
  }
  for (int i = 0; i < 3; ++i) {
    std::vector<StripePlace> rotated(places_.begin() + 1, places_.end());
    rotated.push_back(places_.front());
    places_.swap(rotated);
    const auto store = open();
    EXPECT_EQ(store->durable_generation(), 1U);
    EXPECT_EQ(store->chunk_count(), 16U);
    reactor_.block_on(read_all(*store, 1));
  }
}

TEST_F(Drives, SayWhichDirectoryIsMissingOrTooMuch) {
  add("/a", 1e9, 1);
  add("/b", 1e9, 1);
  create(8).reset();
  const std::vector<StripePlace> both = places_;

  std::vector<StripePlace> first(both.begin(), both.begin() + 1);
  places_.swap(first);
  EXPECT_TRUE(StripedStore::exists(places_, 0));
  EXPECT_THAT(error_of_open(),
              HasSubstr("the store has 2 stripes, but was opened with 1 directory"));

  std::vector<StripePlace> second(both.begin() + 1, both.end());
  places_.swap(second);
  EXPECT_TRUE(StripedStore::exists(places_, 0)) << "or a new store would be made beside it";
  EXPECT_THAT(error_of_open(), HasSubstr("there is no store at"));

  std::vector<StripePlace> again(both.begin(), both.begin() + 1);
  places_.swap(again);
  add("/elsewhere", 1e9, 1);
  EXPECT_THAT(error_of_open(), HasSubstr("rank00000-stripe01.ziggurat, stripe 1 of this store, is "
                                         "in none of /a, /elsewhere"));
}

TEST_F(Drives, GoBackTogetherWhenOneOfThemLostAGeneration) {
  add("/a", 1e9, 1);
  add("/b", 1e9, 1);
  {
    const auto store = create(8);
    reactor_.block_on(sweep(*store, 1));
    reactor_.block_on(sweep(*store, 2));
  }
  const std::string path = "/b/" + StateStore::file_name(0, 1);
  const std::vector<std::byte> zeros(4096);
  disk_.overwrite(path, 0, zeros);  // both copies of the even superblock, generation 2
  disk_.overwrite(path, disk_.contents(path).size() - 2 * 64 * kKiB, zeros);
  const auto store = open();
  EXPECT_EQ(store->durable_generation(), 1U);
  EXPECT_THAT(store->state().notes,
              ::testing::Contains(HasSubstr("fell back from generation 2 to generation 1")));
  reactor_.block_on(read_all(*store, 1));
}

TEST_F(Drives, AnErrorIsThatOfTheDriveWhichHasIt) {
  add("/a", 1e9, 1);
  add("/b", 1e9, 1);
  create(8).reset();
  const std::string path = "/b/" + StateStore::file_name(0, 1);
  for (const std::uint64_t offset : {0, 64}) {
    const std::vector<std::byte> noise(4096, std::byte{0x5a});
    disk_.overwrite(path, offset * kKiB, noise);
    disk_.overwrite(path, disk_.contents(path).size() - (128 - offset) * kKiB, noise);
  }
  const std::string error = error_of_open();
  EXPECT_THAT(error, HasSubstr(path));
  EXPECT_THAT(error, HasSubstr("both superblocks are damaged"));
}

/// What one drive has sealed and another has not is recovery's to decide.
TEST_F(Drives, OfWhichOneAloneHasSealedAreNotWrittenToAgain) {
  add("/a", 1e9, 1);
  FaultyEngine faulty(reactor_, std::make_unique<SimulatedEngine>(reactor_, disk_));
  places_.push_back({.io = faulty, .observers = {}, .directory = "/b", .weight = 1});
  const auto store = create(8);
  faulty.plan(Fault::fail(FaultPoint::kSync, EIO).at(faulty.calls(FaultPoint::kSync)));
  EXPECT_THROW(reactor_.block_on(sweep(*store, 1)), Error);
  for (ChunkId chunk = 0; chunk < store->chunk_count(); ++chunk) {
    for (const std::uint64_t generation : {1, 2}) {
      try {
        reactor_.block_on(write(*store, chunk, generation));
        ADD_FAILURE() << "chunk " << chunk;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("nothing is written to this store any more"));
      }
    }
  }
  EXPECT_EQ(store->durable_generation(), 0U);
}

}  // namespace striped_store_test
}  // namespace ziggurat
