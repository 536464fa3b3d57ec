// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit_simd.cc: updates in the formats with 8-bit moments. A block's moments are
// decoded and updated in registers, and wait in a buffer in L1 until their scale is known.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/eight_bit_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <span>
#include <utility>

#include "base/numerics/simd_target.h"
#include "optimizer/arrays_inl.h"
#include "optimizer/eight_bit_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/rules_inl.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS

static_assert(kEightBitBlock % kFour == 0);

template <EightBitCode kCode>
HWY_INLINE Four moments_of(const EightBitTables& tables, const std::uint8_t* codes, float scale) {
  const Four four = decoded_four<kCode>(tables, codes);
  const F by = hn::Set(Floats(), scale);
  return {{hn::Mul(four.of[0], by), hn::Mul(four.of[1], by), hn::Mul(four.of[2], by),
           hn::Mul(four.of[3], by)}};
}

template <EightBitCode kCode>
void decode_blocks(std::span<const std::uint8_t> codes, const float* scales, float* values) {
  const EightBitTables& tables = eight_bit_tables(kCode);
  const std::size_t whole = codes.size() / kEightBitBlock * kEightBitBlock;
  for (std::size_t i = 0; i < whole; i += kFour) {
    const Four four = moments_of<kCode>(tables, codes.data() + i, scales[i / kEightBitBlock]);
    store_fp32({four.of[0], four.of[1]}, values, i);
    store_fp32({four.of[2], four.of[3]}, values, i + kPair);
  }
  scalar::decode_eight_bit(kCode, codes.subspan(whole), scales + whole / kEightBitBlock,
                           values + whole);
}

template <EightBitCode kCode>
void encode_blocks(const float* values, std::span<std::uint8_t> codes, float* scales) {
  const EightBitTables& tables = eight_bit_tables(kCode);
  const std::size_t whole = codes.size() / kEightBitBlock * kEightBitBlock;
  for (std::size_t begin = 0; begin < whole; begin += kEightBitBlock) {
    W largest = hn::Zero(Words());
    for (std::size_t i = begin; i < begin + kEightBitBlock; i += kPair)
      largest = largest_bits(largest, load_fp32(values, i));
    finish_block<kCode>(tables, scale_of(largest), values + begin, codes.data() + begin,
                        scales + begin / kEightBitBlock);
  }
  scalar::encode_eight_bit(kCode, values + whole, codes.subspan(whole),
                           scales + whole / kEightBitBlock);
}

void decode_eight_bit_simd(EightBitCode code, std::span<const std::uint8_t> codes,
                           const float* scales, float* values) {
  code == EightBitCode::kSigned ? decode_blocks<EightBitCode::kSigned>(codes, scales, values)
                                : decode_blocks<EightBitCode::kUnsigned>(codes, scales, values);
}

void encode_eight_bit_simd(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                           float* scales) {
  code == EightBitCode::kSigned ? encode_blocks<EightBitCode::kSigned>(values, codes, scales)
                                : encode_blocks<EightBitCode::kUnsigned>(values, codes, scales);
}

/// The updated moments of a block.
struct UpdatedMoments {
  alignas(64) float values[kMomentsMax][kEightBitBlock];
  BlockScale scale[kMomentsMax];
};
/// The number of blocks that are updated before the first of them is encoded. A scale is ready some
/// 60 cycles after the last value of its block, and this time passes in the next block's update.
constexpr std::size_t kAhead = 2;

/// Updates two registers, from element `i` on, which is element `in_block` of its block.
template <class Rule, class MastersIn>
HWY_INLINE void update_pair(const OptimizerStep& step, const Slice& slice, std::size_t i,
                            std::size_t in_block, bool past_cache, Pair moment, Pair second,
                            UpdatedMoments& updated, W (&largest)[kMomentsMax]) {
  const Pair master = MastersIn::load(slice, i);
  const Pair gradient = load_gradient<InOrder>(slice, i);
  const Elements low =
      Rule::updated(step, slice.decay, {master.low, moment.low, second.low}, gradient.low);
  const Elements high =
      Rule::updated(step, slice.decay, {master.high, moment.high, second.high}, gradient.high);
  const Pair made{low.master, high.master};
  const WordPair noise =
      noise_of<InOrder, 0>(drawn_by(slice.format, step.rounding), slice, i).param;
  MastersIn::store(made, noise, slice, i);
  if (slice.param != nullptr) store_param<InOrder>(made, noise, past_cache, slice, i);
  const Pair moments{low.moment, high.moment};
  store_fp32(moments, updated.values[0], in_block);
  largest[0] = largest_bits(largest[0], moments);
  if (moment_count(Rule::kKind) == 1) return;
  const Pair seconds{low.second, high.second};
  store_fp32(seconds, updated.values[1], in_block);
  largest[1] = largest_bits(largest[1], seconds);
}

/// Updates the block that begins at element `begin`; its codes and scales are read, but not
/// written.
template <class Rule, class MastersIn>
HWY_INLINE void update_block(const OptimizerStep& step, const Slice& slice, std::size_t begin,
                             bool past_cache, UpdatedMoments& updated) {
  constexpr EightBitCode kFirst = moment_code(Rule::kKind, 0);
  constexpr EightBitCode kSecond = moment_code(Rule::kKind, 1);
  constexpr bool kTwo = moment_count(Rule::kKind) == 2;
  const EightBitTables& first = eight_bit_tables(kFirst);
  const EightBitTables& second = eight_bit_tables(kSecond);
  const auto* codes = reinterpret_cast<const std::uint8_t*>(slice.moments[0]);
  const auto* second_codes = reinterpret_cast<const std::uint8_t*>(slice.moments[1]);
  const std::size_t block = begin / kEightBitBlock;
  W largest[kMomentsMax] = {hn::Zero(Words()), hn::Zero(Words())};
  for (std::size_t in_block = 0; in_block < kEightBitBlock; in_block += kFour) {
    const std::size_t i = begin + in_block;
    const Four m = moments_of<kFirst>(first, codes + i, slice.scales[0][block]);
    Four v = m;
    if (kTwo) v = moments_of<kSecond>(second, second_codes + i, slice.scales[1][block]);
    update_pair<Rule, MastersIn>(step, slice, i, in_block, past_cache, {m.of[0], m.of[1]},
                                 {v.of[0], v.of[1]}, updated, largest);
    update_pair<Rule, MastersIn>(step, slice, i + kPair, in_block + kPair, past_cache,
                                 {m.of[2], m.of[3]}, {v.of[2], v.of[3]}, updated, largest);
  }
  updated.scale[0] = scale_of(largest[0]);
  if (kTwo) updated.scale[1] = scale_of(largest[1]);
}

template <OptimizerKind kKind, std::size_t kMoment>
HWY_INLINE void store_block(const UpdatedMoments& updated, const Slice& slice, std::size_t begin) {
  constexpr EightBitCode kCode = moment_code(kKind, kMoment);
  auto* codes = reinterpret_cast<std::uint8_t*>(slice.moments[kMoment]) + begin;
  finish_block<kCode>(eight_bit_tables(kCode), updated.scale[kMoment], updated.values[kMoment],
                      codes, slice.scales[kMoment] + begin / kEightBitBlock);
}

template <class Rule, class MastersIn>
void update_blocks(const OptimizerStep& step_in, const Slice& slice_in) {
  const OptimizerStep step = step_in;  // copies: see update_inl.h
  const Slice slice = slice_in;
  const bool past_cache = store_params_past_cache(slice);
  UpdatedMoments updated[kAhead];
  for (std::size_t begin = 0; begin < slice.count;) {
    const std::size_t blocks = HWY_MIN(kAhead, (slice.count - begin) / kEightBitBlock);
    for (std::size_t k = 0; k < blocks; ++k)
      update_block<Rule, MastersIn>(step, slice, begin + k * kEightBitBlock, past_cache,
                                    updated[k]);
    for (std::size_t k = 0; k < blocks; ++k, begin += kEightBitBlock) {
      store_block<Rule::kKind, 0>(updated[k], slice, begin);
      if (moment_count(Rule::kKind) == 2) store_block<Rule::kKind, 1>(updated[k], slice, begin);
    }
  }
}

/// Updates the slice if it is in this format, whose moments are codes.
template <StateFormat kFormat>
bool update_in(const OptimizerStep& step, const Slice& slice) {
  if constexpr (has_codes(kFormat)) {
    if (slice.format != kFormat) return false;
    using MastersIn = Masters<masters_of(kFormat), InOrder>;
    with_rule(step.kind, [&]<class Rule>(Rule) { update_blocks<Rule, MastersIn>(step, slice); });
    return true;
  }
  return false;
}

void update_codes_simd(const OptimizerStep& step, const Slice& slice) {
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    static_cast<void>((update_in<static_cast<StateFormat>(kIndex)>(step, slice) || ...));
  }(std::make_index_sequence<kStateFormatCount>());
}

#else

void decode_eight_bit_simd(EightBitCode code, std::span<const std::uint8_t> codes,
                           const float* scales, float* values) {
  scalar::decode_eight_bit(code, codes, scales, values);
}
void encode_eight_bit_simd(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                           float* scales) {
  scalar::encode_eight_bit(code, values, codes, scales);
}
void update_codes_simd(const OptimizerStep& step, const Slice& slice) {
  scalar::update(step, slice);
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat {
namespace internal {

HWY_EXPORT(decode_eight_bit_simd);
HWY_EXPORT(encode_eight_bit_simd);
HWY_EXPORT(update_codes_simd);

void update_codes(const OptimizerStep& step, const Slice& slice) {
  select_kernel(scalar::update, HWY_DISPATCH_TABLE(update_codes_simd))(step, slice);
}

}  // namespace internal

void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values) noexcept {
  using namespace internal;
  select_kernel(scalar::decode_eight_bit, HWY_DISPATCH_TABLE(decode_eight_bit_simd))(
      code, codes, scales, values);
}

void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales) noexcept {
  using namespace internal;
  select_kernel(scalar::encode_eight_bit, HWY_DISPATCH_TABLE(encode_eight_bit_simd))(code, values,
                                                                                     codes, scales);
}

}  // namespace ziggurat
#endif
