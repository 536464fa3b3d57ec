// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_ranks_test.cc: ranks that each lend an engine pieces of their own: the bits are
// those of one rank, whatever the pieces are; all stand at one generation, after a kill too; and
// what one rank refuses or fails at, every rank hears.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cerrno>
#include <filesystem>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "tests/core/lent_world.h"

namespace ziggurat::testing {
namespace lent_ranks_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

struct Ranks {
  const char* name;
  Owners owners;
  Where where;
};
void PrintTo(const Ranks& ranks, std::ostream* out) { *out << ranks.name; }

class LentRanks : public ::testing::TestWithParam<Ranks> {};
class LentRanksStores : public LentRanks {};

std::string name_of(const ::testing::TestParamInfo<Ranks>& one) { return one.param.name; }
const auto kWithStores = ::testing::Values(Ranks{"TwoOnHost", kTwo, Where::kHost},
                                           Ranks{"TwoOnNvme", kTwo, Where::kNvme},
                                           Ranks{"OneTinyParameter", kTiny, Where::kNvme},
                                           Ranks{"OneTinyParameterOnHost", kTiny, Where::kHost},
                                           Ranks{"ThreeOnNvme", kThree, Where::kNvme});
INSTANTIATE_TEST_SUITE_P(WithStores, LentRanks, kWithStores, name_of);
INSTANTIATE_TEST_SUITE_P(InMemory, LentRanks, ::testing::Values(Ranks{"Two", kTwo, Where::kMemory}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Engine, LentRanksStores, kWithStores, name_of);

// A trainer's plain arrays are those that engines of one rank are held against too
// (lent_engine_test.cc). In the second round the engines go on from their stores.
TEST_P(LentRanks, TakeTheBitsOfOneRank) {
  // In the second step rank 1 has no gradient at all, in the fourth nobody has one.
  const std::set<UnitId> all{0, 1, 2, 3, 4, 5, 6};
  const std::vector<UnitId>& second = GetParam().owners[1];
  const std::vector<LentStep> steps{{},
                                    {.left_out = {second.begin(), second.end()}},
                                    {.left_out = {3}, .written = {0, 4, 5}},
                                    {.left_out = all},
                                    {}};
  World world(GetParam().owners, GetParam().where);
  for (std::uint64_t round = 0; round < 2; ++round) {
    if (round == 1 && GetParam().where == Where::kMemory) break;
    expect_none(world.run([&](World::Rank rank) {
      EXPECT_EQ(rank.engine.generation(), round * steps.size());
      EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
      for (const LentStep& step : steps) {
        rank.engine.expect_gradients();
        rank.trainer.step(rank.engine, step);
        rank.engine.wait_all_updated();
        EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
      }
      if (GetParam().where == Where::kMemory) return;
      rank.engine.make_durable();
      EXPECT_EQ(rank.engine.durable_generation(), rank.engine.generation());
      rank.trainer.forget();
    }));
  }
}

// As if rank 1 was killed before it sealed what rank 0 had.
TEST_P(LentRanksStores, GoBackToTheNewestGenerationThatAllHave) {
  World world(GetParam().owners, GetParam().where);
  const std::string kept = world.directory(1) + ".kept";
  std::vector<LentTrainer> at_two;
  expect_none(world.run([](World::Rank rank) {
    rank.trainer.step(rank.engine);
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
  }));
  at_two = world.trainers;
  std::filesystem::copy(world.directory(1), kept);
  expect_none(world.run([](World::Rank rank) {
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
  }));
  std::filesystem::remove_all(world.directory(1));
  std::filesystem::rename(kept, world.directory(1));
  world.trainers = at_two;
  for (LentTrainer& trainer : world.trainers) trainer.forget();
  expect_none(world.run([](World::Rank rank) {
    EXPECT_EQ(rank.engine.generation(), 2U) << "rank " << rank.number;
    EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
    EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
  }));
}

/// Both ranks of `world` train until they are killed; rank 0 tells of each step.
[[noreturn]] void train_until_killed(World& world, int out) {
  world.run([&](World::Rank rank) {
    for (;;) {
      rank.trainer.step(rank.engine);
      const std::uint64_t made = rank.engine.generation();
      if (rank.number == 0 && ::write(out, &made, sizeof(made)) != sizeof(made)) ::_exit(1);
    }
  });
  ::_exit(1);
}

TEST(LentRanksKill, ResumesEveryRankAtTheSameStepBitForBit) {
  World world(kTwo, Where::kNvme);
  std::uint64_t trained = 0;
  for (const std::uint64_t steps : {3U, 4U, 5U}) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) train_until_killed(world, ends[1]);
    ::close(ends[1]);
    std::uint64_t told = 0;
    for (std::uint64_t i = 0; i < steps; ++i)
      ASSERT_EQ(::read(ends[0], &told, sizeof(told)), ssize_t{sizeof(told)});
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    std::uint64_t last = told;
    while (::read(ends[0], &last, sizeof(last)) == sizeof(last)) continue;
    ::close(ends[0]);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    std::vector<std::uint64_t> resumed(2);
    std::vector<LentTrainer> trainers = world.trainers;
    expect_none(world.run([&](World::Rank rank) {
      const std::uint64_t generation = rank.engine.generation();
      resumed[static_cast<std::size_t>(rank.number)] = generation;
      // The newest three may be under way: one swept, one written, one sealed.
      EXPECT_GE(generation + 3, last);
      EXPECT_LE(generation, last + 1);
      LentTrainer& expected = trainers[static_cast<std::size_t>(rank.number)];
      for (std::uint64_t g = trained + 1; g <= generation; ++g) expected.plain_step(g);
      const std::vector<TypedSpan<std::byte>> its = rank.trainer.lent();
      const std::vector<TypedSpan<std::byte>> wanted = expected.lent();
      for (std::size_t p = 0; p < its.size(); ++p)
        EXPECT_TRUE(std::ranges::equal(its[p].bytes, wanted[p].bytes)) << "piece " << p;
    }));
    EXPECT_EQ(resumed[0], resumed[1]);
    EXPECT_GE(resumed[0], trained);
    world.trainers = trainers;
    trained = resumed[0];
  }
}

TEST(LentRanksRefusal, OfOneIsEveryRanksAndChangesNothing) {
  World world(kTwo, Where::kNvme);
  expect_none(world.run([](World::Rank rank) {
    rank.trainer.step(rank.engine);
    rank.engine.wait_all_updated();
    rank.trainer.make_gradients(2, {});
    const std::vector<TypedSpan<const std::byte>> good = rank.trainer.lent_gradients();
    const std::vector<GroupStep> groups = rank.trainer.groups_of({});
    const auto expect_refused = [&](const std::string& why,
                                    std::span<const TypedSpan<const std::byte>> gradients,
                                    const StepOptions& options) {
      const Error error = thrown_by([&] { rank.engine.step(gradients, options); });
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(
          error.what(),
          AllOf(HasSubstr(rank.number == 1 ? "" : "rank 1 refused the step"), HasSubstr(why),
                HasSubstr("nothing was updated, and generation 1 is still current")));
      EXPECT_EQ(rank.engine.generation(), 1U);
      EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
    };
    const bool refuses = rank.number == 1;
    StepOptions options{.groups = groups, .blob = {}};
    expect_refused("3 gradients were given for 4 parameters",
                   std::span(good).first(refuses ? good.size() - 1 : good.size()), options);
    std::vector<GroupStep> wrong = groups;
    wrong[2].learning_rate = std::numeric_limits<float>::quiet_NaN();
    options.groups = refuses ? wrong : groups;
    expect_refused("no step can be made with the settings of 'unit5': learning rate nan", good,
                   options);
    const std::vector<std::byte> blob(kBlobBytesMax + 1);
    options = {.groups = groups, .blob = {}};
    if (refuses) options.blob = blob;
    expect_refused("the blob has 65537 bytes", good, options);
    const Error error = thrown_by([&] {
      if (refuses) rank.engine.refuse_step({ErrorCode::kInvalidArgument, "a model that forgot"});
      rank.engine.step(good, {.groups = groups, .blob = {}});
    });
    EXPECT_THAT(error.what(), HasSubstr("a model that forgot"));
    // The gradients are still lent: the step is made.
    rank.trainer.step(rank.engine);
    rank.engine.make_durable();
    EXPECT_TRUE(rank.trainer.same()) << "rank " << rank.number;
  }));
}

TEST(LentRanksEnd, OfOneIsTheEndOfAllAndIsNamed) {
  World world(kTwo, Where::kNvme);
  auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    auto& runtime = runtimes[static_cast<std::size_t>(rank)];
    LentTrainer& trainer = world.trainers[static_cast<std::size_t>(rank)];
    auto engine =
        LentEngine::open(trainer.own_model(), world.config(rank), *runtime, trainer.lent());
    trainer.step(*engine);
    engine->make_durable();
    if (rank == 1) {
      engine.reset();
      runtime.reset();
      return;
    }
    trainer.step(*engine);
  });
  EXPECT_FALSE(errors[1]);
  const Error error = error_in(errors[0]);
  EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(error.what(), HasSubstr("rank 1"));
}

TEST(LentRanksEnd, ByADriveNamesTheRankAndItsCauseToAll) {
  World world(kTwo, Where::kNvme);
  auto runtimes = connected_runtimes(2, 1);
  std::vector<FaultyEngine*> drives(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    runtimes[rank]->io_engine = [&, rank](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      drives[rank] = faulty.get();
      return faulty;
    };
  }
  std::barrier<> all_done(2);
  const auto errors = run_ranks(2, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    LentTrainer& trainer = world.trainers[static_cast<std::size_t>(rank)];
    const auto engine =
        LentEngine::open(trainer.own_model(), world.config(rank), runtime, trainer.lent());
    trainer.step(*engine);
    engine->make_durable();
    if (rank == 1) {
      runtime.reactor.block_on([](FaultyEngine& its) -> Task<> {
        its.plan(
            Fault::fail(FaultPoint::kWrite, EIO).at(its.calls(FaultPoint::kWrite)).from_then_on());
        co_return;
      }(*drives[1]));
    }
    std::exception_ptr thrown;
    try {
      for (int i = 0; i < 5; ++i) trainer.step(*engine);
    } catch (...) {
      thrown = std::current_exception();
    }
    all_done.arrive_and_wait();
    if (thrown) std::rethrow_exception(thrown);
  });
  EXPECT_THAT(error_in(errors[1]).what(), HasSubstr("EIO"));
  EXPECT_THAT(error_in(errors[0]).what(), AllOf(HasSubstr("rank 1"), HasSubstr("EIO")));
}

/// What every rank says of a config that `change` makes differ on rank 1.
std::string difference(const std::function<void(EngineConfig&)>& change) {
  World world(kTwo, Where::kHost);
  const auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    EngineConfig config = world.config(rank);
    if (rank == 1) change(config);
    LentTrainer& trainer = world.trainers[static_cast<std::size_t>(rank)];
    LentEngine::open(trainer.own_model(), config, *runtimes[static_cast<std::size_t>(rank)],
                     trainer.lent());
  });
  EXPECT_EQ(error_in(errors[1]).code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error_in(errors[0]).what(), HasSubstr(error_in(errors[1]).what()));
  return error_in(errors[0]).what();
}

TEST(LentRanksSettings, MustBeAlikeButForMemory) {
  EXPECT_THAT(difference([](EngineConfig& config) { config.run_identity = "another"; }),
              HasSubstr("differ in `run` (rank 0 has data=1 seed=2 and rank 1 has another);"));
  EXPECT_THAT(
      difference([](EngineConfig& config) { config.store.clear(); }),
      HasSubstr("differ in whether there is a `store` (rank 0 has yes and rank 1 has no);"));
  EXPECT_THAT(difference([](EngineConfig& config) { config.durable_every_s = 7; }),
              HasSubstr("differ in `durable_every` (rank 0 has 0 and rank 1 has 7);"));
}

// One of them converts a store first, the others do not.
TEST(LentRanksSettings, NameTheRanksThatResumeInDifferentWays) {
  using Resume = EngineConfig::Resume;
  EXPECT_THAT(difference([](EngineConfig& config) { config.resume = Resume::kReshard; }),
              HasSubstr("differ in `resume` (rank 0 has auto and rank 1 has reshard);"));
  EXPECT_THAT(difference([](EngineConfig& config) {
                config.resume = Resume::kReshard;
                config.durable_every_s = 7;
              }),
              HasSubstr("differ in `durable_every` (rank 0 has 0 and rank 1 has 7) and in "
                        "`resume` (rank 0 has auto and rank 1 has reshard);"));
}

// With no time between checkpoints one begins after every step, or where one is still being
// written, after the next.
TEST(LentRanksDurable, StoreStateInMemoryAsOftenOnEveryRank) {
  World world(kTwo, Where::kHost);
  const auto runtimes = connected_runtimes(2, 1);
  std::barrier<> all_done(2);
  std::vector<std::uint64_t> durable(2);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = world.config(rank);
    config.durable_every_s = 1e-9;
    LentTrainer& trainer = world.trainers[static_cast<std::size_t>(rank)];
    const auto engine = LentEngine::open(trainer.own_model(), config,
                                         *runtimes[static_cast<std::size_t>(rank)], trainer.lent());
    EXPECT_THAT(engine->description(),
                Contains(HasSubstr(fmt::format("rank {} of 2 has 0.", rank))));
    for (int i = 0; i < 5; ++i) trainer.step(*engine);
    EXPECT_GE(engine->durable_generation() + 2, engine->generation());
    all_done.arrive_and_wait();
    durable[static_cast<std::size_t>(rank)] = engine->durable_generation();
    engine->make_durable();
    EXPECT_EQ(engine->durable_generation(), 5U);
  }));
  EXPECT_LE(std::max(durable[0], durable[1]) - std::min(durable[0], durable[1]), 1U);
}

}  // namespace lent_ranks_test
}  // namespace ziggurat::testing
