// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_repair_test.cc: where several ranks have the same records, one that is damaged
// on one rank's drive is written anew from another's copy, and no generation is lost. The real
// engine on real files.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/memory_exhausted.h"
#include "tests/core/trained_store.h"

namespace ziggurat::testing {
namespace engine_repair_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(const Place& place) {
  const std::vector<std::byte> file = read_file(place.path);
  const auto begin = file.begin() + static_cast<std::ptrdiff_t>(place.offset_bytes);
  return {begin, begin + static_cast<std::ptrdiff_t>(place.size_bytes)};
}

void expect_generation(TrainedStore& store, std::uint64_t generation) {
  expect_none(store.run([&](Engine& engine, int rank) {
    EXPECT_EQ(engine.generation(), generation) << "rank " << rank;
    EXPECT_TRUE(same_params(engine, store.expected[generation], store.model)) << "rank " << rank;
    engine.make_durable();  // so that it closes in peace
  }));
}

/// That the ranks of this store can run in.
std::uint64_t smallest_host_budget(TrainedStore& store) {
  store.adjust = [](EngineConfig& config) { config.host_budget_bytes = 64 * kKiB; };
  std::uint64_t least = 0;
  for (const auto& error : store.run([](Engine&, int) { ADD_FAILURE() << "opened"; })) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const MemoryExhausted& exhausted) {
      least = std::max(least, exhausted.shortage().smallest_bytes);
    } catch (const Error&) {  // another rank's said it first
    }
  }
  return least;
}

class EngineRepair : public ::testing::TestWithParam<Shape> {
 protected:
  /// The ranks that have the records of `rank`, but for itself.
  std::vector<int> others(int rank) const {
    const int group = GetParam().ranks / GetParam().copies;
    std::vector<int> its;
    for (int each = rank % group; each < GetParam().ranks; each += group) {
      if (each != rank) its.push_back(each);
    }
    return its;
  }
};

TEST_P(EngineRepair, EveryRecordOfOneGroupIsWrittenAnewFromAnother) {
  TrainedStore store(GetParam());
  int turn = 0;
  for (int rank = store.shape.ranks - store.group(); rank < store.shape.ranks; ++rank) {
    const auto places = store.records(rank, kSteps);
    for (std::size_t index = 0; index < places.size(); ++index) {
      const auto kind = static_cast<Damage>(turn++ % kDamages);
      SCOPED_TRACE(fmt::format("rank {} record {} damage {}", rank, index, static_cast<int>(kind)));
      store.restore("trained");
      const std::vector<std::byte> whole = bytes_of(places[index]);
      const auto faults = store.damage(places, index, kind);
      const auto repaired =
          AllOf(HasSubstr(places[index].path), HasSubstr("generation 3"),
                HasSubstr(fmt::format("repaired from the copy on rank {}", others(rank).front())));
      expect_none(store.run(
          [&](Engine& engine, int each) {
            EXPECT_EQ(engine.generation(), kSteps);
            EXPECT_TRUE(same_params(engine, store.expected[kSteps], store.model));
            EXPECT_THAT(engine.description(), Contains(repaired).Times(each == rank ? 1 : 0));
            engine.make_durable();
          },
          faults));
      EXPECT_EQ(bytes_of(places[index]), whole);
      expect_none(store.run([&](Engine& engine, int each) {
        EXPECT_THAT(engine.description(), Contains(HasSubstr("damaged")).Times(0));
        store.step(engine, each);
        EXPECT_TRUE(same_params(engine, store.expected[kSteps + 1], store.model));
        engine.make_durable();
      }));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EngineRepair, RanksGiveEachOtherWhatEachHasLost) {
  TrainedStore store(GetParam());
  const int rank = store.shape.ranks - 1;
  const auto mine = store.records(rank, kSteps);
  const auto theirs = store.records(others(rank).front(), kSteps);
  for (std::size_t index = 0; index < mine.size(); ++index)
    store.damage(index % 2 == 0 ? mine : theirs, index, Damage::kFlipped);
  expect_generation(store, kSteps);
  for (std::size_t index = 0; index < mine.size(); ++index)
    EXPECT_EQ(bytes_of(mine[index]), bytes_of(theirs[index])) << index;
}

TEST_P(EngineRepair, ARecordThatNobodyHasAnyMoreTakesAllBackToTheGenerationBefore) {
  TrainedStore store(GetParam());
  const int rank = store.shape.ranks - 1;
  store.damage(store.records(rank, kSteps), 0, Damage::kFlipped);
  for (const int other : others(rank))
    store.damage(store.records(other, kSteps), 0, Damage::kFlipped);
  expect_none(store.run([&](Engine& engine, int each) {
    EXPECT_EQ(engine.generation(), kSteps - 1);
    EXPECT_TRUE(same_params(engine, store.expected[kSteps - 1], store.model));
    EXPECT_THAT(engine.description(),
                Contains(HasSubstr("fell back from generation 3 to generation 2")));
    EXPECT_THAT(engine.description(),
                Contains(HasSubstr("generation 3 is damaged in 1 of"))
                    .Times(each % store.group() == rank % store.group() ? 1 : 0));
    engine.make_durable();
  }));
}

// The verdict comes first: what could have been repaired stays as it is where the run is refused.
TEST_P(EngineRepair, NothingIsWrittenWhereNoGenerationStands) {
  TrainedStore store(GetParam());
  const int rank = store.shape.ranks - 1;
  store.damage(store.records(rank, kSteps), 1, Damage::kFlipped);
  std::vector<int> all = others(rank);
  all.push_back(rank);
  for (const int each : all) {
    for (const std::uint64_t generation : {kSteps, kSteps - 1})
      store.damage(store.records(each, generation), 0, Damage::kFlipped);
  }
  const std::string path = store.records(rank, kSteps).front().path;
  const std::vector<std::byte> before = read_file(path);
  const auto errors = store.run([](Engine&, int) { ADD_FAILURE() << "opened"; });
  int lost = 0;  // who is slower hears it from another rank
  for (const auto& error : errors) {
    const Error said = error_in(error);
    EXPECT_THAT(said.what(), HasSubstr("Nothing was changed"));
    lost += said.code() == ErrorCode::kDataLoss ? 1 : 0;
  }
  EXPECT_GE(lost, 1);
  EXPECT_EQ(read_file(path), before);
}

// Whatever the repair was cut off at: the record is damaged as before, torn, or not durable.
TEST_P(EngineRepair, CutOffAnywhereIsMadeAgain) {
  TrainedStore store(GetParam());
  const int rank = store.shape.ranks - 1;
  const Place place = store.records(rank, kSteps)[1];
  const std::vector<std::byte> whole = bytes_of(place);
  store.damage(store.records(rank, kSteps), 1, Damage::kFlipped);
  const std::vector<std::byte> damaged = bytes_of(place);
  const Fault no_write =
      Fault::fail(FaultPoint::kWrite, EIO).within(place.path, place.offset_bytes, place.size_bytes);
  // After one a stripe at open.
  const Fault no_sync =
      Fault::fail(FaultPoint::kSync, EIO).at(static_cast<std::uint64_t>(store.shape.stripes));
  for (const Fault& fault : {no_write, no_sync}) {
    const auto errors = store.run([](Engine&, int) { ADD_FAILURE() << "opened"; }, {fault});
    EXPECT_EQ(error_in(errors[static_cast<std::size_t>(rank)]).native(), EIO);
    write_at(place, damaged);
  }
  std::vector<std::byte> torn = whole;
  std::copy_n(damaged.begin(), damaged.size() / 2, torn.begin());
  if (torn == whole) torn.back() ^= std::byte{1};
  for (const auto& left : {damaged, torn}) {
    write_at(place, left);
    expect_generation(store, kSteps);
    EXPECT_EQ(bytes_of(place), whole);
  }
}

// A sweep has changed the bytes that it finds wrong. The engine stops, and says where the copy is.
TEST_P(EngineRepair, ASweepThatMeetsDamageNamesTheRankFromWhichTheNextStartRepairsIt) {
  TrainedStore store(GetParam());
  const int rank = store.shape.ranks - 1;
  const auto places = store.records(rank, kSteps);
  const std::uint64_t least = smallest_host_budget(store);
  store.adjust = [least](EngineConfig& config) {
    config.host_budget_bytes = least;  // nothing is kept from sweep to sweep
    config.speculation = EngineConfig::Speculation::kNever;
  };
  const auto errors = store.run([&](Engine& engine, int each) {
    ASSERT_EQ(engine.kept_record_bytes(), 0U);
    if (each == rank) store.damage(places, places.size() - 1, Damage::kFlipped);
    store.step(engine, each);
    engine.make_durable();
  });
  const Error said = error_in(errors[static_cast<std::size_t>(rank)]);
  EXPECT_EQ(said.code(), ErrorCode::kDataLoss);
  EXPECT_THAT(said.what(), AllOf(HasSubstr(places.back().path), HasSubstr("generation 3"),
                                 HasSubstr("wrong checksum"),
                                 HasSubstr(fmt::format("A copy of this record is on rank{} {}",
                                                       others(rank).size() == 1 ? "" : "s",
                                                       fmt::join(others(rank), ", ")))));
  expect_generation(store, kSteps);
}

INSTANTIATE_TEST_SUITE_P(Shapes, EngineRepair,
                         ::testing::Values(Shape{2, 1, 2}, Shape{2, 3, 2}, Shape{3, 1, 3},
                                           Shape{4, 1, 2}),
                         [](const auto& one) {
                           return fmt::format("{}Ranks{}Stripes{}Copies", one.param.ranks,
                                              one.param.stripes, one.param.copies);
                         });

}  // namespace engine_repair_test
}  // namespace ziggurat::testing
