// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/lent_record_test.cc: records whose parameter and gradient are a trainer's own
// memory: of any number of elements, at any address, absent in a step, written between two.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "optimizer/state_values.h"
#include "tests/optimizer/state.h"
#include "tests/support/typed_array.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::testing {
namespace lent_record_test {

using enum OptimizerKind;
using enum StateFormat;

constexpr std::size_t kTile = kTileElements;
constexpr UpdateHashing kVerified{.verify = true, .seed_before = 5, .seed_after = 6};

/// Memory of a trainer's, `offset` elements past a cache line, between bytes that are not its own.
class Guarded {
 public:
  Guarded(const TypedArray& values, std::size_t offset)
      : dtype_(values.dtype),
        size_bytes_(values.bytes.size()),
        memory_(3 * kGuardBytes + size_bytes_, kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = kGuardBytes - address % kGuardBytes + offset * size_bytes(dtype_);
    std::ranges::copy(values.bytes, memory_.begin() + static_cast<std::ptrdiff_t>(begin_));
  }
  TypedSpan<std::byte> span() { return {dtype_, std::span(memory_).subspan(begin_, size_bytes_)}; }
  TypedArray values() {
    TypedArray own(dtype_, span().count());
    std::ranges::copy(span().bytes, own.bytes.begin());
    return own;
  }
  bool intact() const {
    const auto is_guard = [](std::byte byte) { return byte == kGuard; };
    const std::span<const std::byte> all = memory_;
    return std::ranges::all_of(all.first(begin_), is_guard) &&
           std::ranges::all_of(all.subspan(begin_ + size_bytes_), is_guard);
  }

 private:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr std::byte kGuard{0x5a};
  DType dtype_;
  std::size_t size_bytes_;
  std::vector<std::byte> memory_;
  std::size_t begin_;
};

TypedArray drawn(DType dtype, std::size_t count, float size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  TypedArray values(dtype, count);
  for (std::size_t i = 0; i < count; ++i) values.set(i, size * normal(random));
  return values;
}

OptimizerStep step_of(OptimizerKind kind) { return OptimizerStep::make(usual_settings(kind)); }

/// A record of some steps, and the parameter that goes with it.
struct Made {
  OptimizerKind kind;
  StateFormat format;
  std::size_t count;
  TypedArray param;
  std::vector<std::byte> record{};

  Made(OptimizerKind kind_, StateFormat format_, DType dtype, std::size_t count_)
      : kind(kind_), format(format_), count(count_), param(dtype, count_) {
    std::vector<float> masters(tiles() * kTile);
    const TypedArray values = drawn(dtype, count, 0.02F, 1);
    for (std::size_t i = 0; i < count; ++i) masters[i] = values.at(i);
    record.resize(shape().record_bytes(tiles()));
    write_record(kind, format, masters, record);
    for (std::uint32_t t = 1; t <= 3; ++t)
      whole_step(drawn(DType::kFloat32, count, 1e-3F, t), step_of(kind));
  }
  std::size_t tiles() const { return (count + kTile - 1) / kTile; }
  RecordFormat shape() const { return record_format(kind, format); }
  std::uint64_t hash(std::uint64_t seed) const { return record_hash(record, seed, shape()); }

  /// Over whole tiles in memory of the test's: what a trainer's own shorter memory must give too.
  void whole_step(const TypedArray& grad, const OptimizerStep& step) {
    const TypedArray gradients = grad.padded(tiles() * kTile);
    TypedArray params = param.padded(tiles() * kTile);
    const DecayRun run{0, tiles() * kTile, true};
    update_record(
        step,
        {.format = format, .record = record, .grad = gradients.span(), .param = params.span()},
        {&run, 1});
    params.bytes.resize(param.bytes.size());
    param = params;
  }
  /// As a trainer writes its parameter; moments stay.
  void take_masters(const TypedArray& values) {
    std::vector<float> masters(tiles() * kTile);
    for (std::size_t i = 0; i < count; ++i) masters[i] = values.at(i);
    std::vector<std::byte> fresh(record.size());
    write_record(kind, format, masters, fresh);
    std::ranges::copy_n(fresh.begin(), static_cast<std::ptrdiff_t>(moments_at()), record.begin());
    param = values;
  }
  std::uint64_t moments_at() const { return shape().offset(format == kSplit ? 2 : 1, tiles()); }
  RecordView view(TypedSpan<std::byte> trainers, TypedSpan<const std::byte> grad) {
    return {.format = format, .record = record, .grad = grad, .param = trainers};
  }
  UpdateHashes update(const RecordView& view, const OptimizerStep& step,
                      const UpdateHashing* hashing) const {
    const DecayRun run{0, tiles() * kTile, true};
    return update_record(step, view, {&run, 1}, hashing);
  }
  /// Masters past the last element that are not zero, bit for bit.
  std::size_t padding_set() const {
    std::vector<float> masters(tiles() * kTile);
    read_masters(format, record, masters);
    const auto padding = std::span(masters).subspan(count);
    return static_cast<std::size_t>(
        std::ranges::count_if(padding, [](float value) { return to_bits(value) != 0; }));
  }
};

std::vector<DType> param_types(StateFormat format) {
  if (holds_param(format)) return {DType::kBFloat16};
  return {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
}

/// Every format with every type of parameter that it can go with.
class LentRecord : public ::testing::TestWithParam<StateFormat> {};

INSTANTIATE_TEST_SUITE_P(Formats, LentRecord, ::testing::ValuesIn(kAllFormats),
                         [](const auto& one) {
                           std::string name(to_string(one.param));
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST_P(LentRecord, EndsInTheMiddleOfATileAndGetsTheBitsOfAWholeOne) {
  for (const OptimizerKind kind : {kAdamW, kLion, kAdagrad}) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{255}, std::size_t{257}, kTile - 1,
                                    kTile, kTile + 1, 2 * kTile - 300}) {
      for (const DType dtype : param_types(GetParam())) {
        const Made before(kind, GetParam(), dtype, count);
        for (const DType grad_dtype : kAllTypes) {
          SCOPED_TRACE(::testing::Message() << to_string(kind) << " of " << count << " in "
                                            << to_string(dtype) << " by " << to_string(grad_dtype));
          const TypedArray grad = drawn(grad_dtype, count, 1e-3F, 9);
          Made expected = before;
          expected.whole_step(grad, step_of(kind));
          for (const UpdateHashing* hashing :
               {static_cast<const UpdateHashing*>(nullptr), &kVerified}) {
            Made got = before;
            Guarded param(before.param, 0);
            const UpdateHashes hashes =
                got.update(got.view(param.span(), grad.span()), step_of(kind), hashing);
            ASSERT_TRUE(got.record == expected.record);
            ASSERT_EQ(param.values(), expected.param);
            ASSERT_TRUE(param.intact());
            ASSERT_EQ(got.padding_set(), 0U);
            if (hashing == nullptr) continue;
            ASSERT_EQ(hashes.before, before.hash(5));
            ASSERT_EQ(hashes.after, expected.hash(6));
          }
        }
      }
    }
  }
}

TEST_P(LentRecord, IsAtAnyAddress) {
  for (const DType dtype : param_types(GetParam())) {
    const std::size_t count = kTile + 100;
    const Made before(kAdamW, GetParam(), dtype, count);
    const TypedArray grad = drawn(DType::kBFloat16, count, 1e-3F, 9);
    Made expected = before;
    expected.whole_step(grad, step_of(kAdamW));
    for_each_target([&] {
      for (const std::size_t offset : {0U, 1U, 2U, 7U, 8U, 16U, 31U}) {
        SCOPED_TRACE(offset);
        Made got = before;
        Guarded param(before.param, offset);
        Guarded shifted(grad, offset + 1);
        const UpdateHashes hashes =
            got.update(got.view(param.span(), shifted.span()), step_of(kAdamW), &kVerified);
        ASSERT_TRUE(got.record == expected.record);
        ASSERT_EQ(param.values(), expected.param);
        ASSERT_TRUE(param.intact());
        ASSERT_EQ(hashes.before, before.hash(5));
        ASSERT_EQ(hashes.after, expected.hash(6));
      }
    });
  }
}

// 0 / 0 where eps is 0, and -0 where decay turns a value round: what reads the parameter in place
// of its master finds a zero there.
TEST_P(LentRecord, HasZeroPaddingWhateverTheStepWouldMakeOfIt) {
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const bool no_eps : {true, false}) {
      SCOPED_TRACE(::testing::Message() << to_string(kind) << (no_eps ? " without eps" : ""));
      OptimizerStep::Settings settings = usual_settings(kind);
      if (no_eps) settings.eps = 0;
      if (!no_eps) settings.weight_decay = 2 / settings.learning_rate;
      const std::size_t count = kTile + 100;
      Made got(kind, GetParam(), DType::kBFloat16, count);
      const TypedArray grad = drawn(DType::kBFloat16, count, 1e-3F, 9);
      for (const UpdateHashing* hashing :
           {static_cast<const UpdateHashing*>(nullptr), &kVerified}) {
        const std::uint64_t sealed = got.hash(5);
        const UpdateHashes hashes = got.update(got.view(got.param.span(), grad.span()),
                                               OptimizerStep::make(settings), hashing);
        EXPECT_EQ(got.padding_set(), 0U);
        if (hashing == nullptr) continue;
        EXPECT_EQ(hashes.before, sealed);
        EXPECT_EQ(hashes.after, got.hash(6));
      }
    }
  }
}

TEST_P(LentRecord, TakesItsMastersFromAParameterThatWasWritten) {
  for (const std::size_t count : {std::size_t{105}, kTile, kTile + 1}) {
    for (const DType dtype : param_types(GetParam())) {
      SCOPED_TRACE(::testing::Message() << count << " in " << to_string(dtype));
      const Made before(kAdamW, GetParam(), dtype, count);
      const TypedArray written = drawn(dtype, count, 0.5F, 3);
      const TypedArray grad = drawn(DType::kBFloat16, count, 1e-3F, 9);
      Made expected = before;
      expected.take_masters(written);
      expected.whole_step(grad, step_of(kAdamW));
      for (const UpdateHashing* hashing :
           {static_cast<const UpdateHashing*>(nullptr), &kVerified}) {
        Made got = before;
        Guarded param(written, 0);
        RecordView view = got.view(param.span(), grad.span());
        view.masters_from_param = true;
        const UpdateHashes hashes = got.update(view, step_of(kAdamW), hashing);
        ASSERT_TRUE(got.record == expected.record);
        ASSERT_EQ(param.values(), expected.param);
        ASSERT_TRUE(param.intact());
        if (hashing == nullptr) continue;
        ASSERT_EQ(hashes.before, before.hash(5)) << "of the record as it came";
        ASSERT_EQ(hashes.after, expected.hash(6));
      }
    }
  }
}

TEST_P(LentRecord, StaysAsItIsWithoutAGradient) {
  for (const std::size_t count : {std::size_t{105}, kTile, kTile + 1}) {
    for (const DType dtype : param_types(GetParam())) {
      SCOPED_TRACE(::testing::Message() << count << " in " << to_string(dtype));
      const Made before(kAdamW, GetParam(), dtype, count);
      const TypedArray written = drawn(dtype, count, 0.5F, 3);
      for (const bool masters_from_param : {false, true}) {
        const TypedArray& values = masters_from_param ? written : before.param;
        Made expected = before;
        if (masters_from_param) expected.take_masters(written);
        Made got = before;
        Guarded param(values, 0);
        RecordView view = got.view(param.span(), {});
        view.masters_from_param = masters_from_param;
        const UpdateHashes hashes = got.update(view, step_of(kAdamW), &kVerified);
        ASSERT_TRUE(got.record == expected.record) << masters_from_param;
        ASSERT_EQ(param.values(), values);
        ASSERT_TRUE(param.intact());
        ASSERT_EQ(hashes.before, before.hash(5));
        ASSERT_EQ(hashes.after, expected.hash(6)) << masters_from_param;
      }
    }
  }
}

TEST_P(LentRecord, OfSeveralParametersStepsEachAsIfItWereAlone) {
  constexpr std::size_t kCount = 2 * kTile;
  // In 8 bits runs begin with blocks. The fourth reaches into the second tile.
  const std::vector<DecayRun> runs{
      {.begin = 0, .end = 512, .decay = true, .keeps_masters = true},
      {.begin = 512, .end = 768, .decay = true, .skipped = true, .keeps_masters = true},
      {.begin = 768, .end = 1024, .decay = true},
      {.begin = 1024, .end = kTile + 256, .decay = true, .skipped = true},
      {.begin = kTile + 256, .end = kCount - 256, .decay = true, .keeps_masters = true},
      {.begin = kCount - 256,
       .end = kCount,
       .decay = true,
       .skipped = true,
       .keeps_masters = true}};
  for (const DType dtype : param_types(GetParam())) {
    SCOPED_TRACE(to_string(dtype));
    const Made before(kAdamW, GetParam(), dtype, kCount);
    const TypedArray written = drawn(dtype, kCount, 0.5F, 3);
    const TypedArray grad = drawn(DType::kBFloat16, kCount, 1e-3F, 9);
    const auto expected = [&](const DecayRun& run) {
      Made its = before;
      if (!run.keeps_masters) its.take_masters(written);
      if (!run.skipped) its.whole_step(grad, step_of(kAdamW));
      return its;
    };
    for (const UpdateHashing* hashing : {static_cast<const UpdateHashing*>(nullptr), &kVerified}) {
      Made got = before;
      Guarded param(written, 0);
      RecordView view = got.view(param.span(), grad.span());
      view.masters_from_param = true;
      const UpdateHashes hashes = update_record(step_of(kAdamW), view, runs, hashing);
      const TypedArray after = param.values();
      for (const DecayRun& run : runs) {
        const Made its = expected(run);
        for (std::size_t array = 0; array < state_names(kAdamW).size(); ++array) {
          std::vector<float> own(run.end - run.begin);
          std::vector<float> wanted(own.size());
          read_state_values({kAdamW, GetParam()}, array, got.record, run.begin, own);
          read_state_values({kAdamW, GetParam()}, array, its.record, run.begin, wanted);
          ASSERT_EQ(own, wanted) << "array " << array << " from " << run.begin << " on";
        }
        const TypedArray& values = run.skipped ? written : its.param;
        for (std::size_t i = run.begin; i < run.end; ++i)
          ASSERT_EQ(after.at(i), values.at(i)) << "element " << i;
      }
      if (hashing == nullptr) continue;
      ASSERT_EQ(hashes.before, before.hash(5));
      ASSERT_EQ(hashes.after, got.hash(6));
    }
  }
}

TEST_P(LentRecord, NeedsNoMasterThatTheParameterIs) {
  const DType dtype = holds_param(GetParam()) ? DType::kBFloat16 : DType::kFloat32;
  for (const std::size_t count : {std::size_t{105}, kTile, kTile + 1}) {
    SCOPED_TRACE(count);
    const Made before(kAdamW, GetParam(), dtype, count);
    const TypedArray grad = drawn(DType::kBFloat16, count, 1e-3F, 9);
    Made expected = before;
    expected.whole_step(grad, step_of(kAdamW));
    for (const UpdateHashing* hashing : {static_cast<const UpdateHashing*>(nullptr), &kVerified}) {
      Made got = before;
      // As a reader leaves it that skips the first segment.
      const std::uint64_t skipped = got.shape().offset(1, got.tiles());
      std::ranges::fill(std::span(got.record).first(skipped), std::byte{0x77});
      Guarded param(before.param, 0);
      RecordView view = got.view(param.span(), grad.span());
      view.param_not_read = true;
      const UpdateHashes hashes = got.update(view, step_of(kAdamW), hashing);
      ASSERT_TRUE(got.record == expected.record);
      ASSERT_EQ(param.values(), expected.param);
      ASSERT_TRUE(param.intact());
      if (hashing == nullptr) continue;
      ASSERT_EQ(hashes.before, before.hash(5));
      ASSERT_EQ(hashes.after, expected.hash(6));
    }
  }
}

TEST(LentRecordDeathTest, WantsWhatItIsToldToReadFrom) {
  Made made(kAdamW, kFp32, DType::kBFloat16, 105);
  const TypedArray grad = drawn(DType::kBFloat16, 105, 1, 1);
  RecordView view = made.view(made.param.span(), grad.span());
  view.param_not_read = true;
  EXPECT_DEATH(made.update(view, step_of(kAdamW), nullptr),
               "a bf16 parameter is not what a record in fp32 begins with");
  Made same(kAdamW, kFp32, DType::kFloat32, 105);
  view = same.view(same.param.span(), grad.span());
  view.param_not_read = view.masters_from_param = true;
  EXPECT_DEATH(same.update(view, step_of(kAdamW), nullptr), "masters from 105 parameters");
  view = same.view(same.param.span().subspan(0, 104), grad.span());
  EXPECT_DEATH(same.update(view, step_of(kAdamW), nullptr), "104 parameters for 105 elements");
}

}  // namespace lent_record_test
}  // namespace ziggurat::testing
