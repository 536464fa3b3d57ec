// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_damage_test.cc: records that a drive lost, mixed up or cannot read: the engine
// goes on from the generation before with the right bits and says what was lost; met by a sweep, it
// stops and says what remains. The real engine on real files.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "base/log.h"
#include "tests/core/ranks_harness.h"
#include "tests/support/store_file.h"
#include "tiers/state_store.h"

namespace ziggurat::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr std::uint64_t kSteps = 3;

struct Shape {
  int ranks;
  int stripes;
};
void PrintTo(const Shape& shape, std::ostream* out) {
  *out << shape.ranks << " ranks, " << shape.stripes << " stripes";
}

enum class Damage { kFlipped, kStale, kAnothers, kUnreadable };
constexpr int kDamages = 4;

struct Place {
  std::string path;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
};

std::vector<std::byte> read_file(const std::string& path) {
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) ADD_FAILURE() << path;
  return bytes;
}

void write_at(const Place& place, std::span<const std::byte> bytes) {
  const int file = ::open(place.path.c_str(), O_WRONLY);
  ASSERT_GE(file, 0);
  ASSERT_EQ(::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(place.offset_bytes)),
            static_cast<ssize_t>(bytes.size()));
  ASSERT_EQ(::fsync(file), 0);
  ::close(file);
}

/// A trained store, its generations 3 and 2 whole, and what it should hold at each.
class TrainedStore {
 public:
  explicit TrainedStore(Shape its_shape) : shape(its_shape) {
    log().set_level(spdlog::level::off);
    for (int stripe = 0; stripe < shape.stripes; ++stripe)
      directories.push_back({fmt::format("{}/live/{}", scratch.path(), stripe)});
    expected.emplace_back(model, config().clip_norm);
    expected.back().world_size = shape.ranks;
    while (expected.size() <= kSteps + 1) {
      expected.push_back(expected.back());
      expected.back().step(expected.size() - 2, kLearningRate);
    }
    train(1);
    save("first");
    train(kSteps - 1);
    save("trained");
  }

  EngineConfig config() const {
    EngineConfig config = small_config("");
    config.store = directories;
    config.strategy.zero_stage = shape.ranks == 1 ? 0 : 2;
    return config;
  }

  /// Runs `body` on an engine of every rank; `faults` strike reads of all of them.
  std::vector<std::exception_ptr> run(const std::function<void(Engine&, int rank)>& body,
                                      const std::vector<Fault>& faults = {}) {
    const auto runtimes = connected_runtimes(shape.ranks, 1);
    for (const auto& runtime : runtimes) {
      runtime->io_engine = [&faults](Reactor& reactor, const std::string& path) {
        auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
        for (const Fault& fault : faults) faulty->plan(fault);
        return faulty;
      };
    }
    return run_ranks(shape.ranks, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config());
      body(*rig.engine, rank);
    });
  }

  void train(std::uint64_t steps) {
    expect_none(run([&](Engine& engine, int rank) {
      for (std::uint64_t i = 0; i < steps; ++i) step(engine, rank);
      engine.make_durable();
    }));
  }

  void step(Engine& engine, int rank) const {
    const std::uint64_t cursor = engine.generation() + 1;
    train_step(engine, model, engine.generation(), kLearningRate,
               std::as_bytes(std::span(&cursor, 1)), 1.0F, rank);
  }

  void save(const std::string& name) const {
    std::filesystem::copy(scratch.path() + "/live", scratch.path() + "/" + name,
                          std::filesystem::copy_options::recursive);
  }
  void restore(const std::string& name) const {
    std::filesystem::remove_all(scratch.path() + "/live");
    std::filesystem::copy(scratch.path() + "/" + name, scratch.path() + "/live",
                          std::filesystem::copy_options::recursive);
  }

  /// Where the records of `generation` of one rank are, in every stripe.
  std::vector<Place> records(int rank, std::uint64_t generation) const {
    std::vector<Place> places;
    for (int stripe = 0; stripe < shape.stripes; ++stripe) {
      const std::string path = directories[static_cast<std::size_t>(stripe)].path + "/" +
                               StateStore::file_name(rank, static_cast<std::uint32_t>(stripe));
      const auto file = test::StoreFile::of(read_file(path));
      for (ChunkId chunk = 0; chunk < file->spec.record_bytes.size(); ++chunk)
        places.push_back(
            {path, file->layout.record_offset(chunk, generation), file->spec.record_bytes[chunk]});
    }
    return places;
  }

  /// Damages one record; what is to strike reads of it.
  std::vector<Fault> damage(const std::vector<Place>& all, std::size_t index, Damage kind) const {
    const Place place = all[index];
    const std::vector<std::byte> file = read_file(place.path);
    const auto begin = file.begin() + static_cast<std::ptrdiff_t>(place.offset_bytes);
    const std::vector<std::byte> whole(begin,
                                       begin + static_cast<std::ptrdiff_t>(place.size_bytes));
    std::vector<std::byte> bytes = whole;
    switch (kind) {
      case Damage::kUnreadable:
        return {Fault::fail(FaultPoint::kRead, EIO).within(place.path, place.offset_bytes, 512)};
      case Damage::kFlipped: bytes[bytes.size() / 3] ^= std::byte{1}; break;
      case Damage::kStale: {
        std::string old = place.path;
        old.replace(old.find("/live/"), 6, "/first/");
        const std::vector<std::byte> first = read_file(old);
        std::copy_n(first.begin() + static_cast<std::ptrdiff_t>(place.offset_bytes),
                    place.size_bytes, bytes.begin());
        break;
      }
      case Damage::kAnothers: {
        const Place other = all[(index + 1) % all.size()];
        const std::vector<std::byte> foreign = read_file(other.path);
        std::copy_n(foreign.begin() + static_cast<std::ptrdiff_t>(other.offset_bytes),
                    std::min(other.size_bytes, place.size_bytes), bytes.begin());
        break;
      }
    }
    if (bytes == whole) bytes.front() ^= std::byte{1};  // a slice of padding is zeros, as any other
    write_at(place, bytes);
    return {};
  }

  Shape shape;
  ScratchDirectory scratch;
  std::vector<StoreDirectory> directories;
  ModelSpec model = small_model();
  std::vector<PlainTraining> expected;  ///< by generation
};

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
            EXPECT_THAT(notes, Contains(HasSubstr("fell back from generation 3 to 2")).Times(1));
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
  runtimes[0]->io_engine = [&](Reactor& reactor, const std::string& path) {
    auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
    drive = faulty.get();
    return faulty;
  };
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
  const bool safe = said.find("the run goes on from generation 2") != std::string::npos;
  EXPECT_EQ(safe, expect_safe) << said;
  if (!safe) {
    EXPECT_THAT(said, HasSubstr("no generation is whole here"));
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

}  // namespace
}  // namespace ziggurat::testing
