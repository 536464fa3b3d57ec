// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_damage_test.cc: records that a drive lost, mixed up or cannot read: the engine
// goes on from the generation before with the right bits and says what was lost; met by a sweep, it
// stops and says what remains. The real engine on real files.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "base/error.h"
#include "tests/core/trained_store.h"
#include "tests/support/faults_under.h"

namespace ziggurat::testing {
namespace engine_damage_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class EngineDamage : public ::testing::TestWithParam<Shape> {};

TEST_P(EngineDamage, ARecordOfTheNewestGenerationTakesTheRunBackToTheOneBefore) {
  TrainedStore store(GetParam());
  int turn = 0;
  for (int rank = 0; rank < store.shape.ranks; ++rank) {
    const auto places = store.records(rank, kSteps);
    for (std::size_t index = 0; index < places.size(); ++index) {
      const auto kind = static_cast<Damage>(turn++ % kDamages);
      SCOPED_TRACE(fmt::format("rank {} record {} damage {}", rank, index, static_cast<int>(kind)));
      store.restore("trained");
      const auto faults = store.damage(places, index, kind);
      const auto errors = store.run(
          [&](Engine& engine, int each) {
            ASSERT_EQ(engine.generation(), kSteps - 1);
            EXPECT_TRUE(same_params(engine, store.expected[kSteps - 1], store.model));
            std::uint64_t cursor = 0;
            ASSERT_EQ(engine.resumed_blob().size(), sizeof(cursor));
            std::memcpy(&cursor, engine.resumed_blob().data(), sizeof(cursor));
            EXPECT_EQ(cursor, kSteps - 1);
            const auto notes = engine.description();
            EXPECT_THAT(
                notes, Contains(HasSubstr("fell back from generation 3 to generation 2")).Times(1));
            EXPECT_THAT(notes,
                        Contains(HasSubstr("generation 3 is damaged")).Times(each == rank ? 1 : 0));
            store.step(engine, each);
            EXPECT_TRUE(same_params(engine, store.expected[kSteps], store.model));
            engine.make_durable();
          },
          faults);
      expect_none(errors);
      expect_none(store.run([&](Engine& engine, int) {
        EXPECT_EQ(engine.generation(), kSteps);
        EXPECT_TRUE(same_params(engine, store.expected[kSteps], store.model));
      }));
      if (HasFailure()) return;
    }
  }
  EXPECT_GE(turn, 5);
}

INSTANTIATE_TEST_SUITE_P(Shapes, EngineDamage,
                         ::testing::Values(Shape{1, 1}, Shape{1, 3}, Shape{2, 1}, Shape{2, 3}),
                         [](const auto& one) {
                           return fmt::format("{}Ranks{}Stripes", one.param.ranks,
                                              one.param.stripes);
                         });

// A transfer may fail once where the medium is whole.
TEST(EngineDamageOnce, ATransferThatFailsOnceCostsNothing) {
  TrainedStore store({1, 1});
  const Place place = store.records(0, kSteps)[2];
  Fault once =
      Fault::fail(FaultPoint::kRead, EIO).within(place.path, place.offset_bytes, place.size_bytes);
  once.times = 1;
  expect_none(store.run(
      [&](Engine& engine, int) {
        EXPECT_EQ(engine.generation(), kSteps);
        EXPECT_TRUE(same_params(engine, store.expected[kSteps], store.model));
      },
      {once}));
}

TEST(EngineDamageBoth, RecordsOfBothGenerationsAreNamed) {
  TrainedStore store({2, 1});
  store.damage(store.records(0, kSteps), 1, Damage::kFlipped);
  store.damage(store.records(1, kSteps - 1), 2, Damage::kFlipped);
  const auto errors = store.run([](Engine&, int) { ADD_FAILURE() << "opened"; });
  const Error first = error_in(errors[0]);
  const Error second = error_in(errors[1]);
  EXPECT_EQ(first.code(), ErrorCode::kDataLoss);
  EXPECT_THAT(first.what(), AllOf(HasSubstr("generation 3 is damaged"), HasSubstr("chunk 1 "),
                                  HasSubstr("Nothing was changed")));
  EXPECT_THAT(second.what(), AllOf(HasSubstr("generation 2 is damaged"), HasSubstr("chunk 2 "),
                                   HasSubstr("Nothing was changed")));
}

/// The error of a step of an engine whose drive cannot read `unreadable`, and what a new start
/// finds.
void expect_what_a_sweep_says(TrainedStore& store, const std::vector<Place>& unreadable,
                              bool expect_safe) {
  std::vector<Fault> faults;
  for (const Place& place : unreadable)
    faults.push_back(
        Fault::fail(FaultPoint::kRead, EIO).within(place.path, place.offset_bytes, 512));
  // Opened before the drive goes bad: the next generation is trained, then read.
  const auto runtimes = connected_runtimes(1, 1);
  FaultyEngine* drive = nullptr;
  put_faults_under(*runtimes[0], drive);
  std::string said;
  {
    EngineConfig config = store.config();
    config.host_budget_bytes = 2 * kMiB;  // nothing is kept from sweep to sweep
    config.speculation = EngineConfig::Speculation::kNever;
    RankRig rig(*runtimes[0], store.model, config);
    ASSERT_EQ(rig.engine->generation(), kSteps);
    ASSERT_EQ(rig.engine->kept_record_bytes(), 0U);
    runtimes[0]->reactor.block_on([](FaultyEngine& its, const std::vector<Fault>& all) -> Task<> {
      for (const Fault& fault : all) its.plan(fault);
      co_return;
    }(*drive, faults));
    try {
      store.step(*rig.engine, 0);
      rig.engine->make_durable();
      FAIL() << "nothing was noticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      EXPECT_EQ(error.native(), EIO);
      said = error.what();
    }
  }
  EXPECT_THAT(said, AllOf(HasSubstr(unreadable.front().path), HasSubstr("generation 3"),
                          HasSubstr("cannot be read"), HasSubstr("EIO")));
  const bool safe = said.find("training goes on from generation 2") != std::string::npos;
  EXPECT_EQ(safe, expect_safe) << said;
  if (!safe) {
    EXPECT_THAT(said, HasSubstr("this file has no whole generation"));
  }
  const auto errors = store.run(
      [&](Engine& engine, int) {
        EXPECT_EQ(engine.generation(), kSteps - 1);
        EXPECT_TRUE(same_params(engine, store.expected[kSteps - 1], store.model));
      },
      faults);
  if (safe) return expect_none(errors);
  EXPECT_EQ(error_in(errors[0]).code(), ErrorCode::kDataLoss);
}

// No record of generation 4 can be made without its predecessor, so that of 2 stays.
TEST(EngineDamageInASweep, SaysThatTheGenerationBeforeIsWholeAndTheNextStartGoesOnFromIt) {
  TrainedStore store({1, 1});
  expect_what_a_sweep_says(store, store.records(0, kSteps), true);
}

// Forward order: those before it are written over generation 2 when the last one is read.
TEST(EngineDamageInASweep, SaysThatNoGenerationIsWholeAnyMore) {
  TrainedStore store({1, 1});
  expect_what_a_sweep_says(store, {store.records(0, kSteps).back()}, false);
}

}  // namespace engine_damage_test
}  // namespace ziggurat::testing
