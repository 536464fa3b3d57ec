// SPDX-License-Identifier: Apache-2.0
// tests/aio/range_file_test.cc: ranges of a file that begin and end anywhere, beside each other and
// in any order, come back as they were written; the blocks between their edges are moved directly.
#include "aio/range_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <random>

#include "aio/faulty_engine.h"
#include "base/error.h"
#include "base/runtime/for_each.h"
#include "tests/aio/engine_cases.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace range_file_test {

using namespace testing_support;
using ::testing::HasSubstr;

struct Range {
  std::uint64_t begin, end;
};

std::byte byte_at(std::uint64_t offset) {
  return static_cast<std::byte>((offset * 2654435761U) >> 7 & 0xff);
}

class RangeFileTest : public ::testing::TestWithParam<EngineCase> {
 protected:
  std::unique_ptr<RangeFile> create(const std::string& name) {
    return RangeFile::open(reactor, engine, directory.file(name),
                           {.create = true, .writable = true}, {.metrics = &metrics});
  }
  static Task<> write(RangeFile& file, Range range) {
    AlignedPool pool;
    const AlignedBytes memory = RangeFile::memory_for(range.begin, range.end - range.begin, pool);
    for (std::uint64_t i = 0; i < memory.span().size(); ++i)
      memory.span()[i] = byte_at(range.begin + i);
    co_await file.write(range.begin, memory.span());
  }
  static Task<> expect(RangeFile& file, Range range, std::span<std::byte> into) {
    co_await file.read(range.begin, into);
    std::uint64_t wrong = 0;
    for (std::uint64_t i = 0; i < into.size(); ++i) wrong += into[i] != byte_at(range.begin + i);
    EXPECT_EQ(wrong, 0U) << "bytes " << range.begin << " to " << range.end;
  }
  static Task<> expect(RangeFile& file, Range range) {
    AlignedPool pool;
    const AlignedBytes memory = RangeFile::memory_for(range.begin, range.end - range.begin, pool);
    co_await expect(file, range, memory.span());
  }

  TemporaryDirectory directory;
  Reactor reactor{GetParam().clock};
  MakeEngine make = GetParam().make_world();
  FaultyEngine engine{reactor, make(reactor)};
  Metrics metrics;
};

TEST_P(RangeFileTest, NeighboursOfAnySizeInAnyOrderComeBack) {
  std::mt19937_64 random(17);
  std::vector<Range> ranges;
  std::uint64_t end = 0;
  for (const std::uint64_t size :
       {1, 4095, 4096, 4097, 8192, 70'000, 3, 5000, 12'288, 1 << 20, 9, 4096, 333'333}) {
    ranges.push_back({end, end + size});
    end += size;
  }
  for (int round = 0; round < 5; ++round) {
    const auto file = create("data" + std::to_string(round));
    file->allocate(end);
    std::ranges::shuffle(ranges, random);
    const std::function<Task<>(std::size_t)> write_one = [&](std::size_t i) {
      return write(*file, ranges[i]);
    };
    reactor.block_on(for_each_index(reactor, ranges.size(), 4, write_one));
    reactor.block_on(file->sync());
    EXPECT_EQ(file->size_bytes(), end);
    reactor.block_on(expect(*file, {0, end}));
    for (const Range& range : ranges) reactor.block_on(expect(*file, range));
  }
}

TEST_P(RangeFileTest, MemoryThatIsPlacedElsewhereHoldsTheSameBytes) {
  const auto file = create("data");
  reactor.block_on(write(*file, {100, 40'000}));
  std::vector<std::byte> anywhere(30'001);
  reactor.block_on(expect(*file, {333, 333 + 30'001}, anywhere));
}

TEST_P(RangeFileTest, AnEndOfFileInARangeIsNamed) {
  const auto file = create("data");
  reactor.block_on(write(*file, {0, 10'000}));
  for (const Range range : {Range{9'000, 10'001}, Range{0, 20'000}, Range{8'192, 16'384}}) {
    try {
      reactor.block_on(expect(*file, range));
      ADD_FAILURE() << range.end;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      EXPECT_THAT(error.what(), HasSubstr(file->path()));
    }
  }
}

TEST_P(RangeFileTest, AFailureOfAnyPartIsAFailureOfTheRange) {
  const auto file = create("data");
  reactor.block_on(write(*file, {10, 50'000}));
  for (int call = 0; call < 3; ++call) {
    engine.clear_plan();
    const std::uint64_t before = engine.calls(FaultPoint::kWrite);
    engine.plan(Fault::fail(FaultPoint::kWrite, EIO).at(before + static_cast<std::uint64_t>(call)));
    EXPECT_THROW(reactor.block_on(write(*file, {10, 50'000})), Error) << call;
    EXPECT_EQ(engine.in_flight(), 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, RangeFileTest, ::testing::ValuesIn(engine_cases()),
                         [](const auto& its) { return its.param.name; });

}  // namespace range_file_test
}  // namespace ziggurat
