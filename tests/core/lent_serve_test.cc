// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_serve_test.cc: a rank reads the state of pieces that another has, whatever that
// one's trainer does meanwhile: the values are those that it reads itself; and what happens when
// one closes, cannot read, or is not asked for a long time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <thread>

#include "aio/faulty_engine.h"
#include "base/memory_exhausted.h"
#include "tests/core/lent_world.h"
#include "tests/support/faults_under.h"
#include "tiers/device/host_device.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/superblock.h"

namespace ziggurat::testing {
namespace lent_serve_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// Arrays of a rank's pieces, by piece and name.
using State = std::map<std::pair<std::string, std::string>, std::vector<float>>;

/// What `reader` finds of `rank`.
State state_of(LentEngine& reader, int rank) {
  State all;
  for (const LentEngine::Piece& piece : reader.pieces_of(rank)) {
    for (const std::string& name : reader.state_names()) {
      std::vector<float>& values = all[{piece.name, name}];
      values.resize(piece.count);
      reader.read_state_of(rank, piece.name, name, values);
    }
  }
  return all;
}

/// Damages all superblocks of the store in a directory.
void damage_superblocks(const std::string& directory) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() != ".ziggurat") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const std::string zeros(kSuperblockBytes, '\0');
    const auto size_bytes = std::filesystem::file_size(entry.path());
    for (const unsigned parity : {0U, 1U}) {
      for (int copy = 0; copy < kSuperblockCopies; ++copy) {
        const std::uint64_t at = StoreLayout::superblock_offset(parity, copy, size_bytes);
        file.seekp(static_cast<std::streamoff>(at));
        file.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
      }
    }
    ASSERT_TRUE(file.good());
  }
}

class LentServe : public ::testing::TestWithParam<Where> {};

std::string name_of(const ::testing::TestParamInfo<Where>& one) {
  constexpr std::array kNames{"memory", "host", "nvme"};
  return kNames[static_cast<std::size_t>(one.param)];
}
INSTANTIATE_TEST_SUITE_P(Tiers, LentServe,
                         ::testing::Values(Where::kMemory, Where::kHost, Where::kNvme), name_of);

// Rank 1's thread stands elsewhere while it is read.
TEST_P(LentServe, ReadsWhatAnotherRankHasWhileItsTrainerDoesSomethingElse) {
  World world(kTwo, GetParam());
  std::barrier<> read(2);
  State own;
  std::barrier<> known(2);
  expect_none(world.run([&](World::Rank rank) {
    rank.trainer.step(rank.engine);
    rank.trainer.step(rank.engine, {.left_out = {0, 3}});
    if (rank.number == 1) {
      own = state_of(rank.engine, 1);
      EXPECT_EQ(own.size(), 4U * 3U);
      known.arrive_and_wait();
      read.arrive_and_wait();
    } else {
      known.arrive_and_wait();
      EXPECT_EQ(state_of(rank.engine, 1), own);
      read.arrive_and_wait();
    }
    rank.trainer.step(rank.engine);
    rank.engine.wait_all_updated();
    EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
  }));
}

// Rank 1 has what rank 0 reads before and after; in between it waits for rank 0's step.
TEST_P(LentServe, ReadsTheNewestStepWhileTheOtherWaitsInTheNext) {
  World world(kTwo, GetParam());
  std::vector<State> own(4);
  std::vector<State> served(4);
  expect_none(world.run([&](World::Rank rank) {
    for (std::size_t step = 0; step < own.size(); ++step) {
      if (rank.number == 1) {
        own[step] = state_of(rank.engine, 1);
        rank.engine.expect_gradients();
      } else {
        std::this_thread::sleep_for(30ms);
        served[step] = state_of(rank.engine, 1);
      }
      rank.trainer.step(rank.engine);
    }
    rank.engine.wait_all_updated();
    EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
  }));
  for (std::size_t step = 0; step < own.size(); ++step)
    EXPECT_EQ(served[step], own[step]) << "step " << step;
  EXPECT_NE(own[0], own[1]);
}

/// One of several chunks, or two that share one, of which the first is written and the last read.
class LentServeStreamed : public ::testing::TestWithParam<std::vector<std::int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Counts, LentServeStreamed,
                         ::testing::Values(std::vector<std::int64_t>{600'000},
                                           std::vector<std::int64_t>{16'000, 16'000}),
                         [](const auto& one) { return one.index == 0 ? "Large" : "Packed"; });

// Before the first step the values at home are the state, and the trainer writes them.
TEST_P(LentServeStreamed, ReadsAParameterWholeWhileItsTrainerWrites) {
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(2, 2);
  std::atomic<bool> read = false;
  std::barrier<> all_done(2);
  expect_none(run_ranks(2, [&](int rank) {
    ModelSpec model = lent_model(GetParam(), DType::kFloat32);
    for (UnitSpec& unit : model.units) {
      unit.params[0].name = fmt::format("{}{}", unit.params[0].name, rank);
      unit.params[0].streamed = 0;
    }
    EngineConfig config = config_of(Where::kNvme, fmt::format("{}/{}", directory.path(), rank));
    config.placement.params = Tier::kNvme;
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    const auto device = HostDevice::create(runtime.reactor, 4 * kMiB);
    const std::vector<TypedSpan<std::byte>> none(GetParam().size(), {DType::kFloat32, {}});
    const auto engine = LentEngine::open(model, config, runtime, none, device.get());
    struct Together {
      std::atomic<bool>& ended;
      std::barrier<>& all;
      ~Together() {
        ended = true;
        all.arrive_and_wait();
      }
    } const leaving{read, all_done};
    Host host;
    for (float value = 1; rank == 1 && (!read || value == 1); ++value) {
      engine->acquire(0, host);
      auto* const first = reinterpret_cast<float*>(engine->place(0).bytes.address());
      std::ranges::fill(std::span(first, static_cast<std::size_t>(GetParam()[0])), value);
      engine->store_param(0, host);
      engine->release(0, host);
    }
    std::vector<float> values(static_cast<std::size_t>(GetParam().back()));
    const std::string last = engine->pieces_of(1).back().name;
    for (int i = 0; rank == 0 && i < 40; ++i) {
      engine->read_state_of(1, last, "master", values);
      ASSERT_EQ(std::ranges::count(values, values[0]), GetParam().back());
    }
  }));
}

/// The least memory in which every rank's engine works.
std::uint64_t smallest_budget(World& world) {
  std::uint64_t most = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    EngineConfig config = world.config(rank);
    config.host_budget_bytes = 4096;
    LentTrainer& trainer = world.trainers[static_cast<std::size_t>(rank)];
    const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
    try {
      LentEngine::open(trainer.own_model(), config, *runtime, trainer.lent());
    } catch (const MemoryExhausted& error) {
      most = std::max(most, error.shortage().smallest_bytes);
    }
  }
  return most;
}

// Records that were read ahead for the step to come fill what there is.
TEST_P(LentServe, ReadsInAsLittleMemoryAsThereIs) {
  World world(kTwo, GetParam());
  world.host_budget_bytes = smallest_budget(world);
  ASSERT_GT(world.host_budget_bytes, 0U);
  std::vector<State> own(2);
  std::barrier<> known(2);
  expect_none(world.run([&](World::Rank rank) {
    const auto other = 1 - rank.number;
    rank.trainer.step(rank.engine);
    own[static_cast<std::size_t>(rank.number)] = state_of(rank.engine, rank.number);
    rank.engine.expect_gradients();
    known.arrive_and_wait();
    EXPECT_EQ(state_of(rank.engine, other), own[static_cast<std::size_t>(other)]);
    known.arrive_and_wait();
    rank.trainer.step(rank.engine);
    rank.engine.wait_all_updated();
    EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
  }));
}

TEST_P(LentServe, ReadsWhatTheOtherHasWrittenSinceItsStep) {
  World world(kTwo, GetParam());
  std::barrier<> known(2);
  expect_none(world.run([&](World::Rank rank) {
    rank.trainer.step(rank.engine);
    std::vector<float> values(40'000);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 31) + 0.5F;
    if (rank.number == 1) rank.engine.write_state(3, "exp_avg", values);  // unit6
    known.arrive_and_wait();
    if (rank.number == 0) {
      std::vector<float> read(values.size());
      rank.engine.read_state_of(1, "unit6", "exp_avg", read);
      EXPECT_EQ(read, values);
    }
    known.arrive_and_wait();
  }));
}

TEST(LentServeRanks, ReadAllOfEachOtherAtOnce) {
  World world(kThree, Where::kNvme);
  std::vector<State> own(3);
  std::barrier<> known(3);
  expect_none(world.run([&](World::Rank rank) {
    for (int round = 0; round < 3; ++round) {
      rank.trainer.step(rank.engine);
      own[static_cast<std::size_t>(rank.number)] = state_of(rank.engine, rank.number);
      known.arrive_and_wait();
      for (int of = 0; of < 3; ++of)
        EXPECT_EQ(state_of(rank.engine, of), own[static_cast<std::size_t>(of)]) << "of " << of;
      known.arrive_and_wait();
    }
  }));
}

TEST(LentServeRanks, SayWhatEachHas) {
  World world(kTiny, Where::kMemory);
  expect_none(world.run([&](World::Rank rank) {
    const std::vector<LentEngine::Piece> tiny = rank.engine.pieces_of(1);
    ASSERT_EQ(tiny.size(), 1U);
    EXPECT_EQ(tiny[0].name, "unit5");
    EXPECT_EQ(tiny[0].count, 7U);
    ASSERT_EQ(rank.engine.pieces_of(0).size(), 6U);
    EXPECT_EQ(rank.engine.pieces_of(0)[4].name, "unit4");
    EXPECT_EQ(rank.engine.pieces_of(0)[4].count, 600'000U);
  }));
}

TEST(LentServeRanks, RefuseWhatIsNotThere) {
  World world(kTwo, Where::kMemory);
  expect_none(world.run([&](World::Rank rank) {
    std::vector<float> values(105);
    const auto refused = [&](int of, const char* piece, const char* name) {
      const Error error = thrown_by([&] { rank.engine.read_state_of(of, piece, name, values); });
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    };
    EXPECT_THAT(refused(2, "unit1", "master"),
                HasSubstr("there is no rank 2 among 2 ranks: give 0 to 1"));
    EXPECT_THAT(refused(-1, "unit1", "master"), HasSubstr("rank -1"));
    EXPECT_THAT(refused(1, "unit1", "master"), HasSubstr("the rank has no piece of that name"));
    EXPECT_THAT(refused(1, "unit2", "master"),
                HasSubstr("105 elements were asked for, but the piece has 16384"));
    values.resize(16'384);
    EXPECT_THAT(refused(1, "unit2", "sum"), HasSubstr("consists of master, exp_avg, exp_avg_sq"));
    values.resize(105);
    if (rank.number == 0) rank.engine.read_state_of(0, "unit1", "master", values);
  }));
}

/// Two ranks whose engines are closed when the test says so.
class LentServeEnd : public ::testing::Test {
 protected:
  explicit LentServeEnd(Where where = Where::kNvme) : world_(kTwo, where) {}

  void open(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    LentTrainer& trainer = world_.trainers[index];
    EngineConfig config = world_.config(rank);
    config.durable_every_s = durable_every_s_;
    config.durable_every_steps = durable_every_steps_;
    config.placement.grads = grads_;
    engines_[index] =
        LentEngine::open(trainer.own_model(), config, *runtimes_[index], trainer.lent());
    trainer.step(*engines_[index]);
    engines_[index]->make_durable();
  }
  /// Makes the second step; its blob is to follow.
  void step_without_blob(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    LentTrainer& trainer = world_.trainers[index];
    trainer.make_gradients(2, {});
    const std::vector<GroupStep> groups = trainer.groups_of({});
    StepOptions options{.blob = {}, .blob_follows = true};
    options.groups = groups;
    engines_[index]->step(trainer.lent_gradients(), options);
  }
  static void read(LentEngine& engine, int rank, const char* piece, std::uint64_t count) {
    std::vector<float> values(count);
    engine.read_state_of(rank, piece, "master", values);
  }

  World world_;
  double durable_every_s_ = 0;
  std::uint64_t durable_every_steps_ = 1;
  Tier grads_ = Tier::kHost;
  std::vector<std::unique_ptr<Runtime>> runtimes_ = connected_runtimes(2, 1);
  std::vector<std::unique_ptr<LentEngine>> engines_{2};
};

TEST_F(LentServeEnd, OfARanksEngineIsSaidToWhoAsksAndToWhoSteps) {
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    open(rank);
    both.arrive_and_wait();
    if (rank == 1) engines_[1].reset();  // its runtime stays
    both.arrive_and_wait();
    if (rank == 1) return;
    const Error unread = thrown_by([&] { read(*engines_[0], 1, "unit2", 16'384); });
    EXPECT_EQ(unread.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(unread.what(), HasSubstr("rank 1 has closed its engine"));
    EXPECT_EQ(engines_[0]->pieces_of(1).size(), 4U);
    const Error unmade = thrown_by([&] { world_.trainers[0].step(*engines_[0]); });
    EXPECT_EQ(unmade.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(unmade.what(), HasSubstr("step(): rank 1 has closed its engine"));
  }));
}

TEST_F(LentServeEnd, OfARanksEngineEndsTheStepThatWaitsForIt) {
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    open(rank);
    both.arrive_and_wait();
    if (rank == 1) {
      std::this_thread::sleep_for(30ms);
      engines_[1].reset();
      return;
    }
    const Error unmade = thrown_by([&] { world_.trainers[0].step(*engines_[0]); });
    EXPECT_EQ(unmade.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(unmade.what(), HasSubstr("rank 1 has closed its engine"));
  }));
}

class LentServeEndInMemory : public LentServeEnd {
 protected:
  LentServeEndInMemory() : LentServeEnd(Where::kHost) {}
};

TEST_F(LentServeEndInMemory, OfARanksEngineEndsTheCallThatMakesAStepDurable) {
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    open(rank);
    world_.trainers[index].step(*engines_[index]);
    engines_[index]->wait_all_updated();
    both.arrive_and_wait();
    if (rank == 1) {
      std::this_thread::sleep_for(30ms);
      engines_[1].reset();
      return;
    }
    const Error undone = thrown_by([&] { engines_[0]->make_durable(); });
    EXPECT_EQ(undone.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(undone.what(), HasSubstr("rank 1 has closed its engine"));
  }));
}

// Each rank begins to store its part when it has the blob. Rank 1 closes without it, before rank 0
// begins or after.
TEST_F(LentServeEndInMemory, OfARanksEngineEndsACheckpointThatItHasNoPartIn) {
  durable_every_s_ = 1e-9;
  for (const bool before : {false, true}) {
    runtimes_ = connected_runtimes(2, 1);
    world_.trainers = {trainer_of(kTwo[0]), trainer_of(kTwo[1])};
    std::barrier<> both(2);
    expect_none(run_ranks(2, [&](int rank) {
      const auto index = static_cast<std::size_t>(rank);
      open(rank);
      step_without_blob(rank);
      engines_[index]->wait_all_updated();
      both.arrive_and_wait();
      if (rank == 1) {
        if (!before) std::this_thread::sleep_for(30ms);
        engines_[1].reset();
        both.arrive_and_wait();
        return;
      }
      if (before) both.arrive_and_wait();
      const Error undone = thrown_by([&] {
        engines_[0]->give_blob({});
        engines_[0]->make_durable();
      });
      EXPECT_EQ(undone.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(undone.what(), HasSubstr("rank 1 has closed its engine"));
      if (!before) both.arrive_and_wait();
      engines_[0].reset();
    }));
    for (int rank = 0; rank < 2; ++rank) std::filesystem::remove_all(world_.directory(rank));
  }
}

// Rank 0 stores its part when rank 1, whose step is refused for it, still has no blob.
TEST_F(LentServeEndInMemory, OfARanksEngineEndsACheckpointThatWasBegunBeforeARefusedStep) {
  durable_every_s_ = 1e-9;
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    open(rank);
    step_without_blob(rank);
    engines_[index]->wait_all_updated();
    if (rank == 0) engines_[0]->give_blob({});
    both.arrive_and_wait();
    const Error refused = thrown_by([&] { step_without_blob(rank); });
    EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument);
    if (rank == 1) {
      engines_[1].reset();
      return;
    }
    const Error undone = thrown_by([&] { engines_[0]->make_durable(); });
    EXPECT_EQ(undone.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(undone.what(), HasSubstr("rank 1 has closed its engine"));
  }));
}

// The ranks that find their store lost all close what they had opened, and may open another.
TEST_F(LentServeEnd, OfAnOpeningThatFindsAStoreLostHoldsNobodyUp) {
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    open(rank);
    both.arrive_and_wait();
    engines_[index].reset();
    both.arrive_and_wait();
    if (rank == 0) damage_superblocks(world_.directory(0));
    both.arrive_and_wait();
    LentTrainer& trainer = world_.trainers[index];
    EngineConfig config = world_.config(rank);
    const auto reopen = [&] {
      return LentEngine::open(trainer.own_model(), config, *runtimes_[index], trainer.lent());
    };
    EXPECT_EQ(thrown_by([&] { reopen(); }).code(), ErrorCode::kDataLoss);
    config.resume = EngineConfig::Resume::kNever;
    engines_[index] = reopen();
    both.arrive_and_wait();
  }));
}

/// Two ranks whose engines are closed one by one, while a second engine of each goes on.
class LentServeEndOfSome : public LentServeEnd {
 protected:
  std::unique_ptr<LentEngine> open_second(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    LentTrainer& trainer = second_.trainers[index];
    return LentEngine::open(trainer.own_model(), second_.config(rank), *runtimes_[index],
                            trainer.lent());
  }
  /// Rank 0's first engine was closed; rank 1's is closed now.
  void expect_to_go_on(LentEngine& other, int rank) {
    LentTrainer& trainer = second_.trainers[static_cast<std::size_t>(rank)];
    trainer.step(other);
    trainer.step(other);
    if (rank == 1) engines_[1].reset();
    EXPECT_EQ(state_of(other, 1 - rank).size(), rank == 0 ? 3U : 18U);
    other.wait_all_updated();
    EXPECT_TRUE(trainer.same()) << "rank " << rank;
  }

 private:
  World second_{kTiny, Where::kMemory};
};

// What an engine does that is closed between two steps; no other rank waits for any of it.
using Last = void (*)(LentEngine&);
class LentServeEndOfOne : public LentServeEndOfSome, public ::testing::WithParamInterface<Last> {
 protected:
  LentServeEndOfOne() { grads_ = Tier::kNvme; }
};

// The engines of a runtime end one by one, in whatever order, and others go on.
TEST_P(LentServeEndOfOne, LeavesTheOthersOfItsRuntime) {
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    open(rank);
    const auto other = open_second(rank);
    if (rank == 0) {
      GetParam()(*engines_[0]);
      engines_[0].reset();
    }
    expect_to_go_on(*other, rank);
    both.arrive_and_wait();
  }));
}

INSTANTIATE_TEST_SUITE_P(BetweenSteps, LentServeEndOfOne,
                         ::testing::Values(
                             [](LentEngine& its) {
                               its.expect_gradients();  // reads records ahead
                               its.make_durable();
                             },
                             [](LentEngine& its) {
                               its.expect_gradients();
                               const std::vector<float> values(its.pieces_of(0)[0].count, 0.5F);
                               its.add_gradient(0, as_typed(std::span(values)), 1);
                             },
                             [](LentEngine& its) {
                               its.expect_gradients();
                               const std::vector<float> values(its.pieces_of(0)[0].count, 0.5F);
                               its.write_state(0, "exp_avg", values);
                             }));

// No other rank waits for a step that nothing makes durable, also while its records are written.
TEST_F(LentServeEndOfSome, LeavesTheOthersWhereTheLastStepIsNotMadeDurable) {
  durable_every_steps_ = 2;
  FaultyEngine* drive = nullptr;  // once it is opened
  put_faults_under(*runtimes_[0], drive);
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    LentTrainer& trainer = world_.trainers[index];
    open(rank);
    const auto other = open_second(rank);
    trainer.step(*engines_[index]);  // the second: durable by itself
    engines_[index]->make_durable();
    if (rank == 0) {
      runtimes_[0]->reactor.block_on([](FaultyEngine& its) -> Task<> {
        its.plan(Fault::slow(FaultPoint::kWrite, 100ms)
                     .at(its.calls(FaultPoint::kWrite))
                     .from_then_on());
        co_return;
      }(*drive));
    }
    trainer.step(*engines_[index]);
    if (rank == 0) engines_[0].reset();
    expect_to_go_on(*other, rank);
    both.arrive_and_wait();
  }));
}

TEST_F(LentServeEnd, OfARanksProcessIsSaidToWhoAsks) {
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    open(rank);
    both.arrive_and_wait();
    if (rank == 1) {
      runtimes_[1]->reactor.block_on([](Runtime& its) -> Task<> {
        its.ranks->abort("as if it had died");
        co_return;
      }(*runtimes_[1]));
    }
    both.arrive_and_wait();
    if (rank == 1) return;
    const Error unread = thrown_by([&] { read(*engines_[0], 1, "unit2", 16'384); });
    EXPECT_EQ(unread.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(unread.what(), HasSubstr("rank 1"));
  }));
}

// Nobody has a call under way in between: nothing waits for longer than it is given.
TEST(LentServeIdle, RanksAreReadAfterALongerTimeThanCallsAreGiven) {
  World world(kTwo, Where::kNvme);
  world.timeout = 1s;
  std::barrier<> read(2);
  expect_none(world.run([&](World::Rank rank) {
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
    std::this_thread::sleep_for(2s);
    if (rank.number == 0) {
      EXPECT_EQ(state_of(rank.engine, 1).size(), 12U);
    }
    read.arrive_and_wait();
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
  }));
}

TEST(LentServeFault, OfADriveIsSaidToWhoAsks) {
  World world(kTwo, Where::kNvme);
  world.host_budget_bytes = smallest_budget(world);  // no record is kept in memory
  const auto runtimes = connected_runtimes(2, 1);
  FaultyEngine* drive = nullptr;  // once it is opened
  put_faults_under(*runtimes[1], drive);
  std::barrier<> both(2);
  expect_none(run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    LentTrainer& trainer = world.trainers[index];
    const auto engine =
        LentEngine::open(trainer.own_model(), world.config(rank), *runtimes[index], trainer.lent());
    trainer.step(*engine);
    engine->make_durable();
    if (rank == 1) {
      runtimes[1]->reactor.block_on([](FaultyEngine& its) -> Task<> {
        its.plan(
            Fault::fail(FaultPoint::kRead, EIO).at(its.calls(FaultPoint::kRead)).from_then_on());
        co_return;
      }(*drive));
    }
    both.arrive_and_wait();
    if (rank == 0) {
      std::vector<float> values(40'000);
      const Error error = thrown_by([&] { engine->read_state_of(1, "unit6", "exp_avg", values); });
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1: "), HasSubstr("EIO")));
    }
    both.arrive_and_wait();
  }));
}

}  // namespace lent_serve_test
}  // namespace ziggurat::testing
