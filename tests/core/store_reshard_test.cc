// SPDX-License-Identifier: Apache-2.0
// tests/core/store_reshard_test.cc: a store of any trainer's, cut anew by one process: the same
// state for other ranks, which train on with the same bits.
#include "core/engine/state/store_reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "tests/core/checkpoint_rig.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace store_reshard_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr float kLearningRate = 0.01F;

class StoreReshardTest : public ::testing::Test {
 protected:
  void train(std::uint64_t from, std::uint64_t to, PlainTraining& plain) {
    Rig rig(small_model(), small_config(directory_.path()));
    ASSERT_EQ(rig.engine->generation(), from);
    for (std::uint64_t step = from; step < to; ++step) {
      train_step(*rig.engine, small_model(), step, kLearningRate);
      plain.step(step, kLearningRate);
    }
    rig.engine->make_durable();
    EXPECT_TRUE(same_params(*rig.engine, plain, small_model()));
  }
  StoreReshard::Result reshard(int ranks, int stage, StateFormat format = {},
                               std::uint64_t host_bytes = 8 * kMiB) {
    StoreReshard store(*runtime_, {{directory_.path()}});
    return store.run({.model = store.model(),
                      .run_identity = store.content().run_identity,
                      .ranks = ranks,
                      .strategy = {.zero_stage = stage},
                      .format = format,
                      .host_budget_bytes = host_bytes});
  }
  TensorBytes tensors() { return OpenStore(*runtime_, directory_.path()).tensors(); }

  ScratchDirectory directory_;
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 2, .trace_path = ""});
};

TEST_F(StoreReshardTest, IsTheSameStateForAnyRanksAndTrainsOn) {
  PlainTraining plain(small_model(), 1.0F);
  train(0, 2, plain);
  const TensorBytes before = tensors();
  for (const auto& [ranks, stage] : {std::pair{2, 3}, {3, 0}, {8, 2}, {5, 1}}) {
    const StoreReshard::Result result = reshard(ranks, stage);
    EXPECT_TRUE(result.changed);
    EXPECT_THAT(result.notes, IsEmpty());
    OpenStore store(*runtime_, directory_.path());
    EXPECT_EQ(store.state().content().layout.ranks, ranks);
    EXPECT_EQ(store.state().content().step, 2U);
    store.prove();
    EXPECT_THAT(differing(store.tensors(), before), IsEmpty()) << ranks;
  }
  EXPECT_FALSE(reshard(5, 3).changed) << "stages 1 to 3 hold the same";
  reshard(1, 2);
  train(2, 4, plain);
}

TEST_F(StoreReshardTest, NamesWhatAnotherFormatLoses) {
  PlainTraining plain(small_model(), 1.0F);
  train(0, 1, plain);
  const TensorBytes before = tensors();
  EXPECT_THAT(reshard(2, 2, StateFormat::kSplit).notes, IsEmpty());
  const StoreReshard::Result rounded = reshard(2, 2, StateFormat::kBf16Moments);
  EXPECT_THAT(rounded.notes, ::testing::Contains(HasSubstr("exp_avg: F32 to BF16, rounded")));
  reshard(1, 2);
  const TensorBytes after = tensors();
  EXPECT_EQ(after.at("unit2.weight"), before.at("unit2.weight")) << "masters kept every bit";
}

TEST_F(StoreReshardTest, LeavesTheOldStoreWhereItCannotBeDone) {
  PlainTraining plain(small_model(), 1.0F);
  train(0, 1, plain);
  const TensorBytes before = tensors();
  {
    const Rig owner(small_model(), small_config(directory_.path()));
    EXPECT_THROW(reshard(2, 2), Error) << "in use";
  }
  EXPECT_THROW(reshard(2, 2, {}, 1000), Error) << "no memory for one record";
  EXPECT_THROW(StoreReshard(*runtime_, {{directory_.path() + "/nothing"}}), Error);
  EXPECT_THAT(differing(tensors(), before), IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(directory_.path() + "/resharded"));
  train(1, 2, plain);
}

/// A store of two directories. Whoever cuts it anew is stopped before its call number `strike` to
/// files' names, and makes none after.
class CutOffReshard : public StoreReshardTest {
 protected:
  const std::vector<std::string> directories_{directory_.path() + "/a", directory_.path() + "/b"};

  void train_store() {
    EngineConfig config = small_config(directories_[0]);
    config.store.push_back({directories_[1]});
    Rig rig(small_model(), config);
    train_step(*rig.engine, small_model(), 0, kLearningRate);
    rig.engine->make_durable();
  }
  /// False: it ended without being stopped.
  bool reshard_until(int ranks, std::uint64_t strike) {
    std::uint64_t calls = 0;
    const auto gate = [&calls, strike](FaultPoint point) {
      const bool changes_names = point == FaultPoint::kRename || point == FaultPoint::kRemove ||
                                 point == FaultPoint::kMakeDirectory ||
                                 point == FaultPoint::kRemoveDirectory ||
                                 point == FaultPoint::kSyncDirectory;
      if (changes_names) ++calls;
      return calls > strike ? EIO : 0;
    };
    const auto runtime = Runtime::create(
        {.threads = 1,
         .trace_path = "",
         .io_engine = [&gate](Reactor& reactor, const std::string& directory) {
           auto io = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, directory));
           io->set_gate(gate);
           return io;
         }});
    try {
      StoreReshard store(*runtime, {{directories_[0]}, {directories_[1]}});
      store.run({.model = store.model(),
                 .run_identity = store.content().run_identity,
                 .ranks = ranks,
                 .strategy = {.zero_stage = 3},
                 .host_budget_bytes = 8 * kMiB});
    } catch (const Error&) {
      return true;
    }
    return false;
  }
  bool decided() const {
    return std::ranges::any_of(directories_, [](const std::string& directory) {
      return std::filesystem::exists(directory + "/resharded/decided");
    });
  }
};

TEST_F(CutOffReshard, IsReadAsTheStoreThatStandsAndSaysWhatIsLeftToDo) {
  for (const auto& [from, to] : {std::pair{4, 2}, {2, 3}}) {
    std::filesystem::remove_all(directories_[0]);
    std::filesystem::remove_all(directories_[1]);
    train_store();
    ASSERT_FALSE(reshard_until(from, UINT64_MAX));
    const std::filesystem::path kept = directory_.path() + "/kept";
    std::filesystem::remove_all(kept);
    std::filesystem::create_directory(kept);
    for (const char* drive : {"a", "b"})
      std::filesystem::copy(directory_.path() + "/" + drive, kept / drive,
                            std::filesystem::copy_options::recursive);
    const TensorBytes before = OpenStore(*runtime_, directories_).tensors();
    int old_stood = 0;
    int new_stood = 0;
    for (std::uint64_t strike = 0; reshard_until(to, strike); ++strike) {
      SCOPED_TRACE(::testing::Message() << from << " to " << to << ", stopped at " << strike);
      {
        OpenStore store(*runtime_, directories_);
        EXPECT_EQ(store.state().content().layout.ranks == to, decided() || new_stood > 0);
        EXPECT_THAT(differing(store.tensors(), before), IsEmpty());
        store.prove();
        if (decided()) {
          EXPECT_THAT(store.state().notes(), ::testing::Contains(HasSubstr("the next start")));
        }
        ++(store.state().content().layout.ranks == to ? new_stood : old_stood);
      }
      for (const char* drive : {"a", "b"}) {
        std::filesystem::remove_all(directory_.path() + "/" + drive);
        std::filesystem::copy(kept / drive, directory_.path() + "/" + drive,
                              std::filesystem::copy_options::recursive);
      }
    }
    EXPECT_GT(old_stood, 5);
    EXPECT_GT(new_stood, 10);
  }
}

}  // namespace store_reshard_test
}  // namespace ziggurat::testing
