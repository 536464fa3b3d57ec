// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_durable_faults_test.cc: state in memory whose store cannot be written to when
// make_durable() asks: that is said, nothing is lost, training may go on, and once there is space
// again the same call makes it durable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "aio/faulty_engine.h"
#include "aio/thread_engine.h"
#include "base/error.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_durable_faults_test {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;

struct Where {
  const char* name;
  const char* placement;
  int slots = 2;
  std::uint64_t every_steps = 1;
};
void PrintTo(const Where& where, std::ostream* out) { *out << where.name; }

/// Drives of all ranks that fail when a test says so.
class FaultyDrives : public ::testing::Test {
 protected:
  void connect(int ranks) {
    drives_.assign(static_cast<std::size_t>(ranks), nullptr);
    runtimes_ = connected_runtimes(ranks, 1);
    for (std::size_t rank = 0; rank < runtimes_.size(); ++rank) {
      runtimes_[rank]->io_engine = [this, rank](
                                       Reactor& reactor,
                                       const std::string& directory) -> std::unique_ptr<IoEngine> {
        auto drive =
            std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
        if (directory == directory_.path()) drives_[rank] = drive.get();
        return drive;
      };
    }
  }
  EngineConfig config(const Where& where) const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(where.placement);
    config.slots = where.slots;
    config.durable_every_s = 0;
    config.durable_every_steps = where.every_steps;
    return config;
  }
  void fail_next(FaultPoint point, int error, std::uint64_t after = 0, std::size_t rank = 0) {
    runtimes_[rank]->reactor.block_on(
        [](FaultyEngine& drive, FaultPoint its, int number, std::uint64_t calls) -> Task<> {
          drive.plan(Fault::fail(its, number).at(drive.calls(its) + calls));
          co_return;
        }(*drives_[rank], point, error, after));
  }
  static Error error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error";
    return {ErrorCode::kUnimplemented, "none"};
  }
  /// A store that is opened anew has these steps.
  void expect_stored(const Where& where, std::uint64_t steps) {
    connect(1);
    RankRig rig(*runtimes_[0], model_, config(where));
    EXPECT_EQ(rig.engine->generation(), steps);
    PlainTraining plain(model_, 1.0F);
    for (std::uint64_t step = 0; step < steps; ++step) plain.step(step, kLearningRate);
    EXPECT_TRUE(same_params(*rig.engine, plain, model_));
  }

  const ScratchDirectory directory_;
  const ModelSpec model_ = small_model();
  std::vector<FaultyEngine*> drives_;
  std::vector<std::unique_ptr<Runtime>> runtimes_;
};

class StoreOnFaultyDrives : public FaultyDrives, public ::testing::WithParamInterface<Where> {};

INSTANTIATE_TEST_SUITE_P(
    Engine, StoreOnFaultyDrives,
    ::testing::Values(Where{"AllHost", "all=host"}, Where{"OneSlot", "all=host", 1},
                      Where{"AllDevice", "all=device"},
                      Where{"EveryThirdStep", "params=host,grads=host,optimizer=nvme", 2, 3}),
    [](const auto& one) { return std::string(one.param.name); });

/// Whichever write fails, and for whatever reason that goes away.
TEST_P(StoreOnFaultyDrives, AreMadeDurableByTheNextCallOnceThereIsSpace) {
  for (const int error : {ENOSPC, EDQUOT, EFBIG, EIO}) {
    for (const std::uint64_t write : {0, 1}) {
      SCOPED_TRACE(::testing::Message() << "errno " << error << ", write " << write);
      std::filesystem::remove_all(directory_.path());
      std::filesystem::create_directory(directory_.path());
      connect(1);
      {
        RankRig rig(*runtimes_[0], model_, config(GetParam()));
        train_step(*rig.engine, model_, 0, kLearningRate);
        fail_next(FaultPoint::kWrite, error, write);
        EXPECT_EQ(error_of([&] { rig.engine->make_durable(); }).native(), error);
        EXPECT_EQ(rig.engine->durable_generation(), 0U);
        rig.engine->make_durable();
        EXPECT_EQ(rig.engine->durable_generation(), 1U);
      }
      expect_stored(GetParam(), 1);
    }
  }
}

TEST_P(StoreOnFaultyDrives, HoldUpNoStepThatDoesNotNeedThem) {
  connect(1);
  {
    RankRig rig(*runtimes_[0], model_, config(GetParam()));
    train_step(*rig.engine, model_, 0, kLearningRate);
    fail_next(FaultPoint::kWrite, ENOSPC);
    EXPECT_EQ(error_of([&] { rig.engine->make_durable(); }).native(), ENOSPC);
    for (std::uint64_t step = 1; step < 5; ++step)
      train_step(*rig.engine, model_, step, kLearningRate);
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), 5U);
  }
  expect_stored(GetParam(), 5);
}

/// What a failed sync has lost nobody knows: the store is written to no more, says so at every
/// call, and opens at what was durable before.
TEST_P(StoreOnFaultyDrives, ThatFailToSyncAreNotTrustedAgain) {
  connect(1);
  {
    RankRig rig(*runtimes_[0], model_, config(GetParam()));
    rig.engine->make_durable();
    train_step(*rig.engine, model_, 0, kLearningRate);
    fail_next(FaultPoint::kSync, EIO);
    EXPECT_EQ(error_of([&] { rig.engine->make_durable(); }).native(), EIO);
    for (int again = 0; again < 2; ++again) {
      const Error error = error_of([&] { rig.engine->make_durable(); });
      EXPECT_THAT(error.what(), HasSubstr("nothing is written to this store any more"));
      EXPECT_THAT(error.what(), HasSubstr("Generation 0 is durable"));
    }
  }
  if (GetParam().slots == 2) expect_stored(GetParam(), 0);
}

/// What is stored beside training is tried again: a run that ended would lose what is in memory.
TEST_P(StoreOnFaultyDrives, DoNotEndTrainingThatIsStoredBesideIt) {
  if (GetParam().every_steps > 1) GTEST_SKIP() << "its steps write their records themselves";
  connect(1);
  EngineConfig often = config(GetParam());
  often.durable_every_s = 1e-9;
  {
    RankRig rig(*runtimes_[0], model_, often);
    fail_next(FaultPoint::kWrite, ENOSPC);
    for (std::uint64_t step = 0; step < 4; ++step)
      train_step(*rig.engine, model_, step, kLearningRate);
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), 4U);
  }
  expect_stored(GetParam(), 4);
}

TEST_F(FaultyDrives, OfOneRankDoNotEndTrainingThatIsStoredBesideIt) {
  const Where where{"TwoRanks", "all=host"};
  connect(2);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig often = config(where);
    often.durable_every_s = 1e-9;
    RankRig rig(*runtimes_[static_cast<std::size_t>(rank)], model_, often);
    if (rank == 1) fail_next(FaultPoint::kWrite, ENOSPC, 0, 1);
    for (std::uint64_t step = 0; step < 4; ++step)
      train_step(*rig.engine, model_, step, kLearningRate, {}, 1.0F, rank);
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), 4U);
  }));
}

TEST_F(FaultyDrives, ThatFailToSyncEndTrainingThatIsStoredBesideIt) {
  const Where where{"AllHost", "all=host"};
  connect(1);
  EngineConfig often = config(where);
  often.durable_every_s = 1e-9;
  {
    RankRig rig(*runtimes_[0], model_, often);
    fail_next(FaultPoint::kSync, EIO);
    const Error error = error_of([&] {
      for (std::uint64_t step = 0; step < 4; ++step)
        train_step(*rig.engine, model_, step, kLearningRate);
      rig.engine->make_durable();
    });
    EXPECT_THAT(error.what(), HasSubstr("nothing is written to this store any more"));
    EXPECT_EQ(rig.engine->durable_generation(), 0U);
  }
  expect_stored(where, 0);
}

/// One rank's disk is full: no rank waits for it, each is told, and all may ask again.
TEST_F(FaultyDrives, OfOneRankAreAnErrorOnAll) {
  const Where where{"TwoRanks", "all=host"};
  connect(2);
  expect_none(run_ranks(2, [&](int rank) {
    RankRig rig(*runtimes_[static_cast<std::size_t>(rank)], model_, config(where));
    train_step(*rig.engine, model_, 0, kLearningRate, {}, 1.0F, rank);
    if (rank == 1) fail_next(FaultPoint::kWrite, ENOSPC, 0, 1);
    const Error error = error_of([&] { rig.engine->make_durable(); });
    if (rank == 1) {
      EXPECT_EQ(error.native(), ENOSPC);
    } else {
      EXPECT_THAT(error.what(), HasSubstr("another rank could not write its records"));
    }
    train_step(*rig.engine, model_, 1, kLearningRate, {}, 1.0F, rank);
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), 2U);
  }));
}

}  // namespace engine_durable_faults_test
}  // namespace ziggurat::testing
