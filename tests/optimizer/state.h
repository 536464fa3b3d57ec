// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/state.h: an optimizer's arrays at any size, alignment and type, to hand to a
// kernel and to compare.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/numerics/float16.h"
#include "optimizer/kernels.h"
#include "optimizer/update.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::testing {

inline OptimizerStep::Settings usual_settings(OptimizerKind kind = OptimizerKind::kAdamW) {
  return {.kind = kind,
          .learning_rate = 6e-4f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .grad_scale = 0.37f,
          .t = 7,
          .seed = 11};
}

template <class Kind, std::size_t kCount>
constexpr std::array<Kind, kCount> counted() {
  std::array<Kind, kCount> all{};
  for (std::size_t i = 0; i < kCount; ++i) all[i] = static_cast<Kind>(i);
  return all;
}
inline constexpr std::array kAllOptimizers = counted<OptimizerKind, kOptimizerCount>();
inline constexpr std::array kAllFormats = counted<StateFormat, kStateFormatCount>();
/// Those whose slices may be of any length: codes come in blocks (eight_bit_test.cc).
inline constexpr auto kKernelFormats = [] {
  std::array<StateFormat, std::ranges::count_if(
                              kAllFormats, [](StateFormat format) { return !has_codes(format); })>
      formats{};
  std::ranges::copy_if(kAllFormats, formats.begin(),
                       [](StateFormat format) { return !has_codes(format); });
  return formats;
}();
inline constexpr std::array kAllTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Shape {
  OptimizerKind kind = OptimizerKind::kAdamW;
  StateFormat format = StateFormat::kFp32;
  DType grad = DType::kBFloat16;
  DType param = DType::kBFloat16;
};

/// What a Slice points to. `offset` is how many elements each array begins past a cache line.
struct State {
  Shape shape;
  OffsetArray<float> master;
  OffsetArray<bf16> param_record;
  OffsetArray<std::uint16_t> residual;
  OffsetArray<float> moments32[2];
  OffsetArray<bf16> moments16[2];
  OffsetArray<float> grad32, param32;
  OffsetArray<std::uint16_t> grad16, param16;

  explicit State(std::size_t count, Shape shape_ = {}, std::size_t offset = 0)
      : shape(shape_),
        master(count, offset),
        param_record(count, offset),
        residual(count, offset + 2),
        moments32{{count, offset}, {count, offset + 1}},
        moments16{{count, offset}, {count, offset + 3}},
        grad32(count, offset),
        param32(count, offset),
        grad16(count, offset + 1),
        param16(count, 2 * offset) {}

  /// Visits the arrays, by name.
  template <class Visit>
  void each(State& other, Visit&& visit) {
    visit("master", master, other.master);
    visit("param_record", param_record, other.param_record);
    visit("residual", residual, other.residual);
    for (int k = 0; k < 2; ++k) {
      visit("fp32 moment", moments32[k], other.moments32[k]);
      visit("bf16 moment", moments16[k], other.moments16[k]);
    }
    visit("grad32", grad32, other.grad32);
    visit("grad16", grad16, other.grad16);
    visit("param32", param32, other.param32);
    visit("param16", param16, other.param16);
  }
  void copy_from(State& other) {
    each(other, [](const char*, auto& to, auto& from) { to.assign(from.span()); });
  }

  /// Hard values everywhere: some of them special.
  void fill(std::uint32_t seed) {
    HardFloats values(seed);
    const auto set = [&](std::size_t i, float value) { set_master(i, quiet(value)); };
    for (std::size_t i = 0; i < master.span().size(); ++i) {
      set(i, values.next());
      moments32[0].data()[i] = values.next();
      // Mostly what training has, now and then a negative one: the root of it is a new NaN.
      moments32[1].data()[i] = values.word() % 16 == 0 ? values.next() : std::fabs(values.next());
      for (int k = 0; k < 2; ++k) moments16[k].data()[i] = float_to_bf16(moments32[k].data()[i]);
      set_gradient(i, values.next());
      param32.data()[i] = 1.0f;
      param16.data()[i] = 0x1234;
    }
  }
  void fill_like_training(std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < master.span().size(); ++i) {
      set_master(i, 0.02f * normal(random));
      moments32[0].data()[i] = 1e-3f * normal(random);
      moments32[1].data()[i] = 1e-6f * std::fabs(normal(random));
      for (int k = 0; k < 2; ++k) moments16[k].data()[i] = float_to_bf16(moments32[k].data()[i]);
      set_gradient(i, 1e-3f * normal(random));
    }
  }
  void set_master(std::size_t i, float value) {
    master.data()[i] = value;
    const SplitMaster split = split_master(value);
    param_record.data()[i] = split.param;
    residual.data()[i] = split.residual;
  }
  void set_gradient(std::size_t i, float value) {
    grad32.data()[i] = value;
    grad16.data()[i] = shape.grad == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  }

  internal::Slice slice(std::size_t count, float decay) {
    internal::Slice slice{};
    slice.format = shape.format;
    if (holds_param(shape.format)) {
      slice.param_in = slice.param_record = param_record.data();
      slice.residual = residual.data();
    } else {
      slice.master = master.data();
    }
    for (std::size_t k = 0; k < moment_count(shape.kind); ++k) {
      slice.moments[k] = internal::moment_bytes(shape.format) == 2
                             ? reinterpret_cast<std::byte*>(moments16[k].data())
                             : reinterpret_cast<std::byte*>(moments32[k].data());
    }
    slice.grad_dtype = shape.grad;
    slice.grad = shape.grad == DType::kFloat32 ? reinterpret_cast<std::byte*>(grad32.data())
                                               : reinterpret_cast<std::byte*>(grad16.data());
    slice.param_dtype = shape.param;
    slice.param = shape.param == DType::kFloat32 ? reinterpret_cast<std::byte*>(param32.data())
                                                 : reinterpret_cast<std::byte*>(param16.data());
    slice.count = count;
    slice.decay = decay;
    slice.noise_key = {0x12345678u, 0x9abcdef0u};
    slice.noise_index = 5;
    return slice;
  }
};

/// What a format may be told, where that makes a difference.
inline std::vector<Roundings> roundings_of(StateFormat format) {
  constexpr Rounding kDrawn = Rounding::kStochastic;
  std::vector<Roundings> all(1);
  if (rounds_state(format)) all.push_back({.state = kDrawn});
  if (holds_param(format)) return all;
  all.push_back({.params = kDrawn});
  if (rounds_state(format)) all.push_back({.state = kDrawn, .params = kDrawn});
  return all;
}
inline std::string text_of(const Roundings& of) {
  const auto word = [](Rounding rounding) {
    return rounding == Rounding::kNearest ? "nearest" : "stochastic";
  };
  return fmt::format("state {}, parameters {}", word(of.state), word(of.params));
}

/// The first `changed` elements of every array are those of `after`, the rest those of `before`.
inline void expect_prefix_updated(State& got, State& after, State& before, std::size_t changed) {
  got.each(after, [&](const char* name, auto& array, auto& updated) {
    using T = typename std::remove_reference_t<decltype(array.span())>::element_type;
    EXPECT_TRUE(same_bits<T>(array.span().first(changed), updated.span().first(changed)))
        << name << " of " << changed << " elements differs from the specification";
  });
  got.each(before, [&](const char* name, auto& array, auto& original) {
    using T = typename std::remove_reference_t<decltype(array.span())>::element_type;
    EXPECT_TRUE(same_bits<T>(array.span().subspan(changed), original.span().subspan(changed)))
        << name << " was written past element " << changed;
  });
}

inline constexpr std::size_t kLargestOddSize = 4099;

/// Every target gives the bits of the specification for hard values, at odd sizes.
inline void expect_specification(const OptimizerStep& step, const Shape& shape) {
  State before(kLargestOddSize, shape);
  before.fill(2);
  State after(kLargestOddSize, shape);
  after.copy_from(before);
  internal::scalar::update(step, after.slice(kLargestOddSize, step.decay));
  State got(kLargestOddSize, shape, 1);
  for_each_target([&] {
    for (const std::size_t size : {0u, 1u, 7u, 8u, 31u, 33u, 64u, 1000u, 1024u, 4099u}) {
      got.copy_from(before);
      internal::update(step, got.slice(size, step.decay));
      expect_prefix_updated(got, after, before, size);
      ASSERT_FALSE(::testing::Test::HasFailure()) << "size " << size;
    }
  });
}

/// A record of whole tiles with its gradient and parameter.
struct TiledRecord {
  OptimizerKind kind;
  StateFormat format;
  std::size_t count;
  RecordFormat shape;
  OffsetArray<std::byte> record;
  OffsetArray<bf16> grad, param;

  TiledRecord(OptimizerKind kind_, StateFormat format_, std::size_t tiles)
      : kind(kind_),
        format(format_),
        count(tiles * kTileElements),
        shape(record_format(kind, format)),
        record(shape.record_bytes(tiles), 0),
        grad(count, 0),
        param(count, 0) {}

  std::span<std::byte> bytes() { return record.span(); }
  void copy_from(TiledRecord& other) {
    record.assign(other.record.span());
    grad.assign(other.grad.span());
    param.assign(other.param.span());
  }
  /// A state some steps old, of ordinary values.
  void fill(std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> masters(count);
    for (float& value : masters) value = 0.02f * normal(random);
    write_record(kind, format, masters, bytes());
    OptimizerStep::Settings settings = usual_settings(kind);
    for (settings.t = 1; settings.t <= 3; ++settings.t) {
      for (bf16& value : grad.span()) value = float_to_bf16(1e-3f * normal(random));
      update(OptimizerStep::make(settings));
    }
  }
  RecordView view() {
    return {.format = format,
            .record = bytes(),
            .grad = as_typed(std::span<const bf16>(grad.span())),
            .param = as_typed(param.span())};
  }
  UpdateHashes update(const OptimizerStep& step, const UpdateHashing* hashing = nullptr) {
    const DecayRun whole{0, count, true};
    return update_record(step, view(), {&whole, 1}, hashing);
  }
  std::vector<float> masters() {
    std::vector<float> values(count);
    read_masters(format, bytes(), values);
    return values;
  }
};

}  // namespace ziggurat::testing
