// SPDX-License-Identifier: Apache-2.0
// tests/core/store_reshard_test.cc: a store of any trainer's, cut anew by one process: the same
// state for other ranks, which train on with the same bits.
#include "core/engine/store_reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/core/checkpoint_rig.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace {

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

}  // namespace
}  // namespace ziggurat::testing
