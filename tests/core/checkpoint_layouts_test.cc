// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_layouts_test.cc: what one layout of ranks saved any other loads: the same
// bits, and the same training from there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/core/checkpoint_rig.h"

namespace ziggurat::testing {
namespace {

using ::testing::IsEmpty;

constexpr int kSteps = 3;

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {.name = "one_rank"},
      {.name = "one_rank_host", .optimizer = Tier::kHost},
      {.name = "one_rank_device", .optimizer = Tier::kDevice, .params = Tier::kDevice},
      {.name = "two_ranks_stage0", .ranks = 2, .stage = 0},
      {.name = "two_ranks_stage1", .ranks = 2, .stage = 1},
      {.name = "two_ranks_stage2_host", .ranks = 2, .stage = 2, .optimizer = Tier::kHost},
      {.name = "three_ranks_stage3", .ranks = 3},
      {.name = "four_ranks_stage3", .ranks = 4},
      {.name = "four_ranks_hybrid", .ranks = 4, .shard_group = 2},
      {.name = "four_ranks_tp2", .ranks = 4, .tp = 2},
      {.name = "two_ranks_tp2_stage0", .ranks = 2, .tp = 2, .stage = 0},
      {.name = "eight_ranks_stage3", .ranks = 8},
  };
  return all;
}

CheckpointRequest to(const ScratchDirectory& scratch, const std::string& folder) {
  return {.folder = (scratch.path() + "/" + folder), .resume = {}};
}
std::string checkpoint_in(const CheckpointRequest& request, std::uint64_t step) {
  return request.folder + "/" + checkpoint_name(step);
}

/// A part of the layouts, which load what all saved: each saves once, and not for each that loads.
class AllLayouts : public ::testing::TestWithParam<std::size_t> {};
constexpr std::size_t kLayoutParts = 3;
INSTANTIATE_TEST_SUITE_P(Parts, AllLayouts, ::testing::Range<std::size_t>(0, kLayoutParts));

TEST_P(AllLayouts, LoadWhatAnyOtherSavedAndTrainOnAsFromTheirOwn) {
  const ScratchDirectory scratch;
  // Three steps of one rank: moments that are not zero.
  const CheckpointRequest first = to(scratch, "first");
  on_ranks(layouts()[0], scratch, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(first);
  });
  const std::string begin = checkpoint_in(first, 3);
  const TensorBytes state = tensors_of(begin);
  for (const Layout& one : layouts()) {
    SCOPED_TRACE(one.name);
    const CheckpointRequest saved = to(scratch, "saved-" + one.name);
    on_ranks(one, scratch, begin,
             [&](CheckpointRank& rank) { rank.engine->save_checkpoint(saved); });
    EXPECT_THAT(differing(tensors_of(checkpoint_in(saved, 3)), state), IsEmpty());
  }
  for (std::size_t i = GetParam(); i < layouts().size(); i += kLayoutParts) {
    const Layout& one = layouts()[i];
    const CheckpointRequest own = to(scratch, "own-" + one.name);
    on_ranks(one, scratch, begin, [&](CheckpointRank& rank) {
      for (int step = 0; step < kSteps; ++step) rank.step();
      rank.engine->save_checkpoint(own);
    });
    const TensorBytes trained = tensors_of(checkpoint_in(own, 3 + kSteps));
    EXPECT_FALSE(differing(state, trained).empty());
    for (const Layout& other : layouts()) {
      SCOPED_TRACE(one.name + " from " + other.name);
      const CheckpointRequest loaded = to(scratch, "loaded");
      on_ranks(one, scratch, checkpoint_in(to(scratch, "saved-" + other.name), 3),
               [&](CheckpointRank& rank) {
                 EXPECT_EQ(rank.engine->generation(), 3U);
                 rank.engine->save_checkpoint(loaded);
                 for (int step = 0; step < kSteps; ++step) rank.step();
                 rank.engine->save_checkpoint(loaded);
               });
      EXPECT_THAT(differing(tensors_of(checkpoint_in(loaded, 3)), state), IsEmpty());
      EXPECT_THAT(differing(tensors_of(checkpoint_in(loaded, 3 + kSteps)), trained), IsEmpty());
      std::filesystem::remove_all(loaded.folder);
    }
  }
}

class EveryLayout : public ::testing::TestWithParam<std::size_t> {
 protected:
  const Layout& layout_ = layouts()[GetParam()];
  ScratchDirectory scratch_;
};

TEST_P(EveryLayout, GoesOnFromItsOwnCheckpointAsIfNothingHadHappened) {
  const CheckpointRequest straight = to(scratch_, "straight");
  on_ranks(layout_, scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(straight);
    for (int step = 0; step < kSteps; ++step) rank.step();
    rank.engine->save_checkpoint(straight);
  });
  const CheckpointRequest resumed = to(scratch_, "resumed");
  on_ranks(layout_, scratch_, checkpoint_in(straight, 3), [&](CheckpointRank& rank) {
    for (int step = 0; step < kSteps; ++step) rank.step();
    rank.engine->save_checkpoint(resumed);
  });
  EXPECT_THAT(differing(tensors_of(checkpoint_in(resumed, 3 + kSteps)),
                        tensors_of(checkpoint_in(straight, 3 + kSteps))),
              IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Layouts, EveryLayout, ::testing::Range<std::size_t>(0, 12),
                         [](const auto& its) { return layouts()[its.param].name; });

class EveryFormat : public ::testing::TestWithParam<Layout> {
 protected:
  ScratchDirectory scratch_;
};

TEST_P(EveryFormat, KeepsItsBitsFromOneRankToThreeAndBack) {
  Layout one = GetParam();
  Layout three = one;
  three.ranks = 3;
  three.name += "_three";
  const CheckpointRequest straight = to(scratch_, "straight");
  on_ranks(one, scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(straight);
    for (int step = 0; step < kSteps; ++step) rank.step();
    rank.engine->save_checkpoint(straight);
  });
  const std::string begin = checkpoint_in(straight, 3);
  const CheckpointRequest cut = to(scratch_, "cut");
  on_ranks(three, scratch_, begin,
           [&](CheckpointRank& rank) { rank.engine->save_checkpoint(cut); });
  EXPECT_THAT(differing(tensors_of(checkpoint_in(cut, 3)), tensors_of(begin)), IsEmpty());
  const CheckpointRequest back = to(scratch_, "back");
  on_ranks(one, scratch_, checkpoint_in(cut, 3), [&](CheckpointRank& rank) {
    for (int step = 0; step < kSteps; ++step) rank.step();
    rank.engine->save_checkpoint(back);
  });
  EXPECT_THAT(differing(tensors_of(checkpoint_in(back, 3 + kSteps)),
                        tensors_of(checkpoint_in(straight, 3 + kSteps))),
              IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    Formats, EveryFormat,
    ::testing::Values(Layout{.name = "fp32_params", .dtype = DType::kFloat32},
                      Layout{.name = "bf16_moments", .format = StateFormat::kBf16Moments},
                      Layout{.name = "eight_bit", .format = StateFormat::k8Bit},
                      Layout{.name = "split", .format = StateFormat::kSplit},
                      Layout{.name = "bf16", .format = StateFormat::kBf16},
                      Layout{.name = "stochastic", .rounding = Rounding::kStochastic},
                      Layout{.name = "stochastic_bf16",
                             .format = StateFormat::kBf16,
                             .rounding = Rounding::kStochastic}),
    [](const auto& its) { return its.param.name; });

/// What a state of one format becomes in another.
std::vector<std::string> notes_of(const ScratchDirectory& scratch, const std::string& from,
                                  const Layout& layout, const CheckpointRequest& saved) {
  std::vector<std::string> notes;
  on_ranks(layout, scratch, from, [&](CheckpointRank& rank) {
    notes = rank.engine->description();
    rank.engine->save_checkpoint(saved);
  });
  return notes;
}

TEST(ConvertedState, IsNamedWhereItIsRoundedAndExactWhereItIsNot) {
  const ScratchDirectory scratch;
  const CheckpointRequest first = to(scratch, "first");
  on_ranks({.name = "fp32"}, scratch, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(first);
  });
  const std::string begin = checkpoint_in(first, 3);
  // Two halves are one master.
  const CheckpointRequest split = to(scratch, "split");
  notes_of(scratch, begin, {.name = "split", .format = StateFormat::kSplit}, split);
  EXPECT_THAT(differing(tensors_of(checkpoint_in(split, 3)), tensors_of(begin)), IsEmpty());
  // Rounded, and said so.
  const CheckpointRequest bf16 = to(scratch, "bf16");
  EXPECT_THAT(notes_of(scratch, begin, {.name = "bf16", .format = StateFormat::kBf16Moments}, bf16),
              ::testing::Contains(::testing::HasSubstr("exp_avg: F32 to BF16, rounded")));
  // What was rounded comes back as it is.
  const CheckpointRequest wide = to(scratch, "wide");
  EXPECT_THAT(notes_of(scratch, checkpoint_in(bf16, 3), {.name = "wide"}, wide),
              ::testing::Contains(::testing::HasSubstr("exp_avg: BF16 to F32, exactly")));
  const CheckpointRequest again = to(scratch, "again");
  notes_of(scratch, checkpoint_in(wide, 3), {.name = "again", .format = StateFormat::kBf16Moments},
           again);
  EXPECT_THAT(differing(tensors_of(checkpoint_in(again, 3)), tensors_of(checkpoint_in(bf16, 3))),
              IsEmpty());
  // From codes: as values, and named.
  const CheckpointRequest codes = to(scratch, "codes");
  EXPECT_THAT(notes_of(scratch, begin, {.name = "codes", .format = StateFormat::k8Bit}, codes),
              ::testing::Contains(::testing::HasSubstr("exp_avg: F32 to U8, rounded")));
  const CheckpointRequest decoded = to(scratch, "decoded");
  EXPECT_THAT(notes_of(scratch, checkpoint_in(codes, 3), {.name = "decoded"}, decoded),
              ::testing::Contains(::testing::HasSubstr("exp_avg: U8 to F32, exactly")));
}

TEST(EightBits, AreRefusedWhereRanksDivideLayers) {
  const ScratchDirectory scratch;
  const auto runtimes = connected_runtimes(2, 1);
  const Layout layout{.name = "divided", .ranks = 2, .tp = 2, .format = StateFormat::k8Bit};
  for (const std::exception_ptr& thrown : run_ranks(2, [&](int rank) {
         CheckpointRank(*runtimes[static_cast<std::size_t>(rank)], layout,
                        config_of(layout, scratch.path() + "/store"), "");
       })) {
    const Error error = error_in(thrown);
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("drift apart"));
  }
}

TEST(LoadedWeights, BeginAnewWithoutTheOptimizersState) {
  const ScratchDirectory scratch;
  const CheckpointRequest first = to(scratch, "first");
  on_ranks({.name = "one"}, scratch, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(first);
  });
  const CheckpointRequest second = to(scratch, "second");
  on_ranks({.name = "two", .ranks = 2}, scratch, checkpoint_in(first, 3),
           [&](CheckpointRank& rank) {
             EXPECT_EQ(rank.engine->generation(), 0U);
             EXPECT_FALSE(rank.engine->resumed());
             rank.engine->save_checkpoint(second);
           },
           {.weights_only = true});
  TensorBytes before = tensors_of(checkpoint_in(first, 3));
  const TensorBytes after = tensors_of(checkpoint_in(second, 0));
  for (const auto& [name, bytes] : after) {
    if (!name.starts_with("optimizer.")) {
      EXPECT_EQ(bytes, before[name]) << name;
    } else {
      EXPECT_EQ(std::ranges::count(bytes, std::byte{}), std::ssize(bytes)) << name;
    }
  }
}

}  // namespace
}  // namespace ziggurat::testing
