// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/update_test.cc: every optimizer in every format on every target, against the
// specification's bits.
#include "optimizer/update.h"

#include <vector>

#include "optimizer/kernels.h"
#include "tests/optimizer/state.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace update_test {

using testing::expect_prefix_updated;
using testing::expect_specification;
using testing::for_each_target;
using testing::from_bits;
using testing::kLargestOddSize;
using testing::same_bits;
using testing::State;
using testing::TiledRecord;
using testing::to_bits;
using testing::usual_settings;

TEST(Update, AdamWGivesTheSpecificationsBitsAtEverySizeAndAlignment) {
  const OptimizerStep step = OptimizerStep::make(usual_settings());
  State before(kLargestOddSize);
  before.fill(1);
  State after(kLargestOddSize);
  after.copy_from(before);
  internal::scalar::update(step, after.slice(kLargestOddSize, step.decay));

  for (const std::size_t offset : {0, 1, 15}) {
    State got(kLargestOddSize, {}, offset);
    for_each_target([&] {
      for (std::size_t size = 0; size <= kLargestOddSize; ++size) {
        got.copy_from(before);
        internal::update(step, got.slice(size, step.decay));
        expect_prefix_updated(got, after, before, size);
        ASSERT_FALSE(::testing::Test::HasFailure()) << "size " << size;
      }
    });
  }
}

class EveryOptimizer : public ::testing::TestWithParam<OptimizerKind> {};
INSTANTIATE_TEST_SUITE_P(Update, EveryOptimizer, ::testing::ValuesIn(testing::kAllOptimizers),
                         [](const auto& of) { return std::string(to_string(of.param)); });

TEST_P(EveryOptimizer, GivesTheSpecificationsBitsInEveryFormatAndType) {
  for (const StateFormat format : testing::kKernelFormats) {
    for (const Roundings& rounding : testing::roundings_of(format)) {
      OptimizerStep::Settings settings = usual_settings(GetParam());
      settings.rounding = rounding;
      const OptimizerStep step = OptimizerStep::make(settings);
      for (const DType grad : testing::kAllTypes) {
        for (const DType param : testing::kAllTypes) {
          if (holds_param(format) && param != DType::kBFloat16) continue;
          SCOPED_TRACE(::testing::Message()
                       << to_string(format) << ", gradient " << to_string(grad) << ", parameter "
                       << to_string(param) << ", " << testing::text_of(rounding));
          expect_specification(step, {GetParam(), format, grad, param});
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(EveryOptimizer, StoresOneNaNWhateverNaNCameIn) {
  const OptimizerStep step = OptimizerStep::make(usual_settings(GetParam()));
  constexpr std::size_t kCount = 64;
  for_each_target([&] {
    for (const std::uint32_t nan :
         {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fa12345u}) {
      for (int where = 0; where < 3; ++where) {
        State state(kCount, {.kind = GetParam()});
        state.fill_like_training(1);
        for (std::size_t i = 0; i < kCount; ++i) {
          if (where == 0) state.master.data()[i] = from_bits(nan);
          if (where == 1) state.moments32[0].data()[i] = from_bits(nan);
          if (where == 2) state.grad16.data()[i] = static_cast<bf16>((nan >> 16) | 1u);
        }
        internal::update(step, state.slice(kCount, step.decay));
        for (std::size_t i = 0; i < kCount; ++i) {
          ASSERT_EQ(to_bits(state.master.data()[i]), kNaNBits) << where;
          ASSERT_EQ(state.param16.data()[i], kNaNBits >> 16) << where;
          const float moment = state.moments32[0].data()[i];
          ASSERT_TRUE(moment == moment || to_bits(moment) == kNaNBits) << where;
        }
      }
    }
  });
}

TEST(Update, AdamWKeepsDenormals) {
  const OptimizerStep step = OptimizerStep::make(usual_settings());
  for_each_target([&] {
    State state(40);
    for (std::size_t i = 0; i < 40; ++i) {
      state.set_master(i, from_bits(0x00012345));
      state.moments32[0].data()[i] = 0.0f;
      state.moments32[1].data()[i] = from_bits(0x00000100);
      state.set_gradient(i, 0.0f);
    }
    internal::update(step, state.slice(40, step.no_decay));
    for (std::size_t i = 0; i < 40; ++i) {
      ASSERT_EQ(to_bits(state.master.data()[i]), 0x00012345u);
      ASSERT_EQ(to_bits(state.moments32[1].data()[i]), 0x000000f3u);  // 256 x 0.95 = 243.2
      ASSERT_EQ(state.param16.data()[i], 0x0001);
    }
  });
}

TEST(Update, TheSplitMasterIsAnyMasterButNaNExactly) {
  for (const std::uint32_t upper :
       {0x0000u, 0x0001u, 0x3f80u, 0x7f7fu, 0x7f80u, 0xbf80u, 0xff7fu}) {
    for (std::uint32_t lower = 0; lower <= 0xffffu; ++lower) {
      const float master = from_bits(upper << 16 | (upper == 0x7f80u ? 0 : lower));
      const SplitMaster split = split_master(master);
      ASSERT_EQ(to_bits(joined(split)), to_bits(master));
      ASSERT_EQ(split.param, float_to_bf16(master));
    }
  }
  EXPECT_EQ(to_bits(joined(split_master(from_bits(kNaNBits)))), kNaNBits);
}

/// Gradients of step `t`: each element drifts its own way, with noise.
void draw_gradients(std::span<bf16> gradients, std::uint32_t t) {
  std::mt19937 random(t);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const float noise = static_cast<float>(random() >> 8) * 0x1p-24f - 0.5f;
    const float drift = static_cast<float>(i % 7) - 3.0f;
    gradients[i] = float_to_bf16(0.01f * (drift + noise));
  }
}

TEST(UpdateRecord, SplitMastersHaveTheBitsOfFp32ForAThousandSteps) {
  for (const bool param_not_read : {false, true}) {
    TiledRecord whole(OptimizerKind::kAdamW, StateFormat::kFp32, 1);
    TiledRecord split(OptimizerKind::kAdamW, StateFormat::kSplit, 1);
    std::vector<float> masters(whole.count);
    for (std::size_t i = 0; i < masters.size(); ++i)
      masters[i] = 1e-6f * static_cast<float>(i) - 0.008f;
    write_record(whole.kind, whole.format, masters, whole.bytes());
    write_record(split.kind, split.format, masters, split.bytes());
    for (std::size_t i = 0; i < split.count; ++i) split.param.data()[i] = float_to_bf16(masters[i]);
    OptimizerStep::Settings settings = usual_settings();
    const DecayRun run{0, whole.count, true};
    for (settings.t = 1; settings.t <= 1000; ++settings.t) {
      draw_gradients(whole.grad.span(), static_cast<std::uint32_t>(settings.t));
      split.grad.assign(whole.grad.span());
      const OptimizerStep step = OptimizerStep::make(settings);
      update_record(step, whole.view(), {&run, 1});
      RecordView view = split.view();
      view.param_not_read = param_not_read;
      if (param_not_read)  // as a reader leaves it that skips the first segment
        std::ranges::fill(split.bytes().first(2 * split.count), std::byte{0x77});
      update_record(step, view, {&run, 1});
    }
    const std::vector<float> want = whole.masters(), got = split.masters();
    EXPECT_TRUE(same_bits<float>(got, want));
    EXPECT_TRUE(same_bits<bf16>(split.param.span(), whole.param.span()));
    const auto moments = [](TiledRecord& record, std::size_t first) {
      return std::span<const std::byte>(record.bytes()).subspan(record.shape.offset(first, 1));
    };
    EXPECT_TRUE(same_bits<std::byte>(moments(split, 2), moments(whole, 1)));
  }
}

TEST(UpdateRecord, DecaysExactlyTheRunsThatSaySo) {
  const std::vector<DecayRun> runs = {{0, 1, false},       {1, 18, true},
                                      {18, 18, false},     {18, 777, false},
                                      {777, 2048, true},   {2048, 2999, false},
                                      {2999, 20000, true}, {20000, 2 * kTileElements, false}};
  for (const StateFormat format : testing::kAllFormats) {
    SCOPED_TRACE(to_string(format));
    TiledRecord before(OptimizerKind::kAdamW, format, 2), decayed(OptimizerKind::kAdamW, format, 2);
    TiledRecord kept(OptimizerKind::kAdamW, format, 2), got(OptimizerKind::kAdamW, format, 2);
    before.fill(3);
    OptimizerStep::Settings settings = usual_settings();
    decayed.copy_from(before);
    decayed.update(OptimizerStep::make(settings));
    kept.copy_from(before);
    settings.weight_decay = 0;
    kept.update(OptimizerStep::make(settings));
    settings.weight_decay = 0.1f;
    for_each_target([&] {
      got.copy_from(before);
      update_record(OptimizerStep::make(settings), got.view(), runs);
      const std::vector<float> masters = got.masters(), yes = decayed.masters(),
                               no = kept.masters();
      for (const DecayRun& run : runs) {
        for (std::size_t i = run.begin; i < run.end; ++i) {
          ASSERT_EQ(to_bits(masters[i]), to_bits(run.decay ? yes[i] : no[i])) << i;
          ASSERT_EQ(got.param.data()[i], (run.decay ? decayed : kept).param.data()[i]) << i;
        }
      }
    });
  }
}

TEST(UpdateRecord, EveryGroupHasItsOwnStep) {
  OptimizerStep::Settings other = usual_settings();
  other.learning_rate *= 0.5f;
  other.beta1 = 0.5f;
  other.weight_decay = 0.25f;
  StepScalars steps{OptimizerStep::make(usual_settings()), OptimizerStep::make(other)};
  steps.push_back(OptimizerStep::make(usual_settings()));
  steps.back().no_decay = 0.5f;
  const std::vector<DecayRun> runs = {{0, 1, true, 1},
                                      {1, 777, false, 2},
                                      {777, 20000, true, 0},
                                      {20000, 2 * kTileElements, false, 1}};
  for (const StateFormat format : testing::kAllFormats) {
    SCOPED_TRACE(to_string(format));
    TiledRecord before(OptimizerKind::kAdamW, format, 2), got(OptimizerKind::kAdamW, format, 2);
    before.fill(4);
    for_each_target([&] {
      got.copy_from(before);
      update_record(steps, got.view(), runs);
      const std::vector<float> masters = got.masters();
      for (const DecayRun& run : runs) {
        TiledRecord alone(OptimizerKind::kAdamW, format, 2);
        alone.copy_from(before);
        update_record(steps[run.group], alone.view(),
                      std::vector<DecayRun>{{0, 2 * kTileElements, run.decay}});
        const std::vector<float> want = alone.masters();
        for (std::size_t i = run.begin; i < run.end; ++i)
          ASSERT_EQ(to_bits(masters[i]), to_bits(want[i])) << i;
      }
    });
  }
}

TEST(UpdateRecord, HashesTheRecordBeforeAndAfterAndChangesTheSameBits) {
  const std::vector<DecayRun> runs = {{0, 100, true},
                                      {100, kTileElements + 3, false},
                                      {kTileElements + 3, 3 * kTileElements, true}};
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kLion}) {
    for (const StateFormat format : testing::kAllFormats) {
      SCOPED_TRACE(::testing::Message() << to_string(kind) << " " << to_string(format));
      const OptimizerStep step = OptimizerStep::make(usual_settings(kind));
      TiledRecord before(kind, format, 3), plain(kind, format, 3), hashed(kind, format, 3);
      before.fill(4);
      plain.copy_from(before);
      update_record(step, plain.view(), runs);
      for_each_target([&] {
        for (const bool verify : {false, true}) {
          hashed.copy_from(before);
          const UpdateHashing hashing{.verify = verify, .seed_before = 11, .seed_after = 22};
          const UpdateHashes hashes = update_record(step, hashed.view(), runs, &hashing);
          EXPECT_TRUE(same_bits<std::byte>(hashed.bytes(), plain.bytes()));
          EXPECT_TRUE(same_bits<bf16>(hashed.param.span(), plain.param.span()));
          EXPECT_EQ(hashes.before, verify ? record_hash(before.bytes(), 11, before.shape) : 0u);
          EXPECT_EQ(hashes.after, record_hash(plain.bytes(), 22, plain.shape));
        }
      });
    }
  }
}

TEST(UpdateRecord, OneChangedBitInAnySegmentChangesTheHashBefore) {
  for (const StateFormat format : testing::kAllFormats) {
    TiledRecord record(OptimizerKind::kAdamW, format, 2);
    record.fill(5);
    for (std::size_t index = 0; index < record.shape.segments().size(); ++index) {
      const std::uint64_t sealed = record_hash(record.bytes(), 5, record.shape);
      record.bytes()[record.shape.offset(index + 1, 2) - 1] ^= std::byte{0x10};
      const UpdateHashing hashing{.verify = true, .seed_before = 5, .seed_after = 6};
      EXPECT_NE(record.update(OptimizerStep::make(usual_settings()), &hashing).before, sealed)
          << record.shape.segments()[index].name;
    }
  }
}

TEST(UpdateRecord, AParameterThatWasNotReadIsVerifiedWhereItIs) {
  for (const StateFormat format : {StateFormat::kSplit, StateFormat::kBf16}) {
    TiledRecord record(OptimizerKind::kAdamW, format, 2);
    record.fill(6);
    const std::uint64_t sealed = record_hash(record.bytes(), 5, record.shape);
    RecordView view = record.view();
    view.param_not_read = true;
    std::ranges::fill(record.bytes().first(2 * record.count), std::byte{0x77});
    const UpdateHashing hashing{.verify = true, .seed_before = 5, .seed_after = 6};
    const DecayRun whole{0, record.count, true};
    const UpdateHashes hashes =
        update_record(OptimizerStep::make(usual_settings()), view, {&whole, 1}, &hashing);
    EXPECT_EQ(hashes.before, sealed);
    EXPECT_EQ(hashes.after, record_hash(record.bytes(), 6, record.shape));
    EXPECT_TRUE(std::ranges::equal(std::as_bytes(record.param.span()),
                                   record.bytes().first(2 * record.count)));
  }
}

TEST(UpdateRecord, ChunksAndTargetsDrawTheSameNoise) {
  OptimizerStep::Settings settings = usual_settings();
  settings.rounding = {.state = Rounding::kStochastic, .params = Rounding::kStochastic};
  const OptimizerStep step = OptimizerStep::make(settings);
  constexpr std::size_t kTiles = 3;
  TiledRecord before(OptimizerKind::kAdamW, StateFormat::kFp32, kTiles);
  TiledRecord whole(OptimizerKind::kAdamW, StateFormat::kFp32, kTiles);
  before.fill(7);
  whole.copy_from(before);
  whole.update(step);
  for_each_target([&] {
    for (std::size_t tile = 0; tile < kTiles; ++tile) {
      TiledRecord part(OptimizerKind::kAdamW, StateFormat::kFp32, 1);
      const std::size_t first = tile * kTileElements;
      for (std::size_t array = 0; array < 3; ++array) {
        std::ranges::copy(
            before.bytes().subspan(before.shape.offset(array, kTiles) + tile * kTileBytes,
                                   kTileBytes),
            part.bytes().begin() + static_cast<std::ptrdiff_t>(part.shape.offset(array, 1)));
      }
      part.grad.assign(before.grad.span().subspan(first, kTileElements));
      RecordView view = part.view();
      view.first_element = first;
      const DecayRun run{0, kTileElements, true};
      update_record(step, view, {&run, 1});
      EXPECT_TRUE(
          same_bits<bf16>(part.param.span(), whole.param.span().subspan(first, kTileElements)))
          << tile;
    }
  });
}

TEST(UpdateRecord, StochasticRoundingIsUnbiasedAndNewEachStep) {
  // Masters a quarter of the way from one bf16 value to the next: a quarter of the draws go up.
  TiledRecord record(OptimizerKind::kSgd, StateFormat::kFp32, 4);
  const std::vector<float> masters(record.count, from_bits(0x3f804000u));
  write_record(record.kind, record.format, masters, record.bytes());
  std::ranges::fill(record.grad.span(), bf16{0});
  OptimizerStep::Settings settings = usual_settings(OptimizerKind::kSgd);
  settings.rounding = {.state = Rounding::kStochastic, .params = Rounding::kStochastic};
  settings.weight_decay = 0;
  std::vector<bf16> last;
  for (settings.t = 1; settings.t <= 8; ++settings.t) {
    record.update(OptimizerStep::make(settings));
    std::size_t up = 0, same = 0;
    for (std::size_t i = 0; i < record.count; ++i) {
      ASSERT_TRUE(record.param.data()[i] == 0x3f80 || record.param.data()[i] == 0x3f81);
      if (record.param.data()[i] == 0x3f81) ++up;
      if (!last.empty() && last[i] == record.param.data()[i]) ++same;
    }
    // 65,536 draws: a standard deviation is 0.0017 of them; two steps agree in 10 of 16 cases.
    const auto share = [&](std::size_t n) {
      return static_cast<double>(n) / static_cast<double>(record.count);
    };
    EXPECT_NEAR(share(up), 0.25, 0.01) << settings.t;
    if (!last.empty()) {
      EXPECT_NEAR(share(same), 0.625, 0.01) << settings.t;
    }
    last.assign(record.param.span().begin(), record.param.span().end());
  }
}

TEST(UpdateRecordDeathTest, WantsARecordOfItsElementsAndRunsThatCoverItInOrder) {
  TiledRecord record(OptimizerKind::kAdamW, StateFormat::kFp32, 1);
  record.fill(1);
  const OptimizerStep step = OptimizerStep::make(usual_settings());
  const std::vector<DecayRun> short_run = {{0, 15, true}};
  const std::vector<DecayRun> hole = {{0, 4, true}, {5, kTileElements, true}};
  EXPECT_DEATH(update_record(step, record.view(), short_run), "runs cover 15 of 16384");
  EXPECT_DEATH(update_record(step, record.view(), hole), "after a run that ended at 4");
  const std::vector<DecayRun> stranger = {{0, kTileElements, true, 1}};
  EXPECT_DEATH(update_record(step, record.view(), stranger), "a run of group 1, and 1 steps");
  RecordView part = record.view();
  part.grad.bytes = part.grad.bytes.first(200);
  EXPECT_DEATH(update_record(step, part, short_run), "16384 parameters for 100 elements");
  RecordView longer = record.view();
  longer.record = longer.record.first(kTileBytes);
  EXPECT_DEATH(update_record(step, longer, short_run), "65536 bytes for a record of 16384");
  EXPECT_DEATH(update_record(step, {}, {}), "0 bytes for a record of 0 elements");
}

}  // namespace update_test
}  // namespace ziggurat
