// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit_inl.h: converts 8-bit codes to registers and back, with the bits of
// eight_bit.cc, by the straight lines of eight_bit_tables.h. Included once per target.
#if defined(ZIGGURAT_OPTIMIZER_EIGHT_BIT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_OPTIMIZER_EIGHT_BIT_INL_H_
#undef ZIGGURAT_OPTIMIZER_EIGHT_BIT_INL_H_
#else
#define ZIGGURAT_OPTIMIZER_EIGHT_BIT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "optimizer/arrays_inl.h"
#include "optimizer/eight_bit_tables.h"
#include "optimizer/kernels.h"

#if ZIGGURAT_HAVE_VECTORS

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

using Codes = hn::Rebind<std::uint8_t, Floats>;  // the same number of 8-bit lanes
using FloatMask = hn::Mask<Floats>;
constexpr bool kShortRegisters = kLanes < 8;

/// Looks up values in EightValues.
class Choice {
 public:
  HWY_INLINE explicit Choice(W index)
      : upper_(hn::RebindMask(Floats(), hn::TestBit(index, hn::Set(Words(), 4u)))),
        indices_(hn::IndicesFromVec(
            Floats(), kShortRegisters ? hn::And(index, hn::Set(Words(), 3u)) : index)) {}
  HWY_INLINE F in(const EightValues& values) const {
    const F lower = hn::TableLookupLanes(hn::Load(Floats(), values.data()), indices_);
    if constexpr (!kShortRegisters) return lower;
    const F upper = hn::TableLookupLanes(hn::Load(Floats(), values.data() + 4), indices_);
    return hn::IfThenElse(upper_, upper, lower);
  }

 private:
  FloatMask upper_;  // used with short registers
  decltype(hn::IndicesFromVec(Floats(), W())) indices_;
};

/// Returns table[index]; the table has kCount words.
template <std::size_t kCount, class Indices>
HWY_INLINE W word_at(const std::uint32_t* table, Indices in_register, W index) {
  if constexpr (kCount <= kLanes) {
    return hn::TableLookupLanes(hn::Load(Words(), table), in_register);
  } else {
    constexpr std::size_t kHalf = kCount / 2;
    const auto bit = hn::Set(Words(), static_cast<std::uint32_t>(kHalf));
    return hn::IfThenElse(hn::TestBit(index, bit),
                          word_at<kHalf>(table + kHalf, in_register, index),
                          word_at<kHalf>(table, in_register, index));
  }
}

/// Returns how far the value of a rank lies off its line, in units of the last place.
template <EightBitCode kCode>
HWY_INLINE hn::Vec<SignedWords> nudge_of(const EightBitTables& tables, W rank) {
  constexpr std::size_t kWords = kCode == EightBitCode::kSigned ? 16 : 32;
  const Words d;
  const W word = hn::ShiftRight<3>(rank);
  const W lane = hn::And(word, hn::Set(d, static_cast<std::uint32_t>(kLanes) - 1));
  const W eight = word_at<kWords>(tables.nudges.data(), hn::IndicesFromVec(d, lane), word);
  const W shift = hn::AndNot(hn::ShiftLeft<2>(rank), hn::Set(d, 28u));
  return hn::ShiftRight<28>(hn::BitCast(SignedWords(), hn::Shl(eight, shift)));
}

template <EightBitCode kCode>
HWY_INLINE F decoded(const EightBitTables& tables, const std::uint8_t* codes) {
  const SignedWords d;
  const auto code = hn::PromoteTo(d, hn::LoadU(Codes(), codes));
  // With short registers the look-ups below would take as many loads as this gather.
  if constexpr (kShortRegisters) return hn::GatherIndex(Floats(), tables.values.data(), code);
  const auto signed_rank = hn::Sub(code, hn::Set(d, static_cast<std::int32_t>(kSignedZero)));
  const auto rank = kCode == EightBitCode::kSigned ? hn::Abs(signed_rank) : code;
  F place = hn::ConvertTo(Floats(), rank);
  if (kCode == EightBitCode::kUnsigned)
    place = hn::Min(hn::Add(place, hn::Set(Floats(), 1.0f)), hn::Set(Floats(), kTopPlace));
  const W exponent = hn::ShiftRight<23>(hn::BitCast(Words(), place));
  const Choice line(hn::And(exponent, hn::Set(Words(), 7u)));
  const F rise = hn::Mul(line.in(tables.value_slope), place);
  const F on_line = hn::Add(line.in(tables.value_offset), rise);
  const auto nudge = nudge_of<kCode>(tables, hn::BitCast(Words(), rank));
  const F value = hn::BitCast(Floats(), hn::Add(hn::BitCast(d, on_line), nudge));
  if (kCode == EightBitCode::kUnsigned) return value;
  const FloatMask is_zero = hn::Eq(place, hn::Zero(Floats()));
  return hn::IfThenZeroElse(is_zero, hn::CopySignToAbs(value, hn::BitCast(Floats(), signed_rank)));
}

/// Holds kFour values in the order of memory.
constexpr std::size_t kFour = 4 * kLanes;
struct Four {
  F of[4];
};

#if HWY_TARGET <= HWY_AVX3_DL
using Bytes = hn::Repartition<std::uint8_t, Floats>;

/// Looks up bytes of floats. On this target one instruction looks up 64 times among 128 bytes, so
/// floats byte by byte take a quarter of the time of lines. (Highway 1.0 has no name for that
/// instruction.)
HWY_INLINE hn::Vec<Bytes> plane_at(const std::array<std::uint8_t, 256>& plane, hn::Vec<Bytes> code,
                                   hn::Mask<Bytes> in_upper_half) {
  const Bytes d;
  const auto among_128 = [&](const std::uint8_t* of) HWY_ATTR {
    return hn::Vec<Bytes>{
        _mm512_permutex2var_epi8(hn::Load(d, of).raw, code.raw, hn::Load(d, of + 64).raw)};
  };
  return hn::IfThenElse(in_upper_half, among_128(plane.data() + 128), among_128(plane.data()));
}

template <EightBitCode kCode>
HWY_INLINE Four decoded_four(const EightBitTables& tables, const std::uint8_t* codes) {
  const Bytes d;
  const hn::Repartition<std::uint16_t, Bytes> halves;
  // Transposes groups of four codes as a 4 x 4 matrix; the interleaving below undoes that.
  alignas(64) static constexpr std::int32_t kTransposed[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                               2, 6, 10, 14, 3, 7, 11, 15};
  const W groups = hn::BitCast(Words(), hn::LoadU(d, codes));
  const auto code =
      hn::BitCast(d, hn::TableLookupLanes(groups, hn::SetTableIndices(Words(), kTransposed)));
  const auto in_upper_half = hn::Ne(hn::And(code, hn::Set(d, 0x80)), hn::Zero(d));
  const auto byte0 = plane_at(tables.planes[0], code, in_upper_half);
  const auto byte1 = plane_at(tables.planes[1], code, in_upper_half);
  const auto byte2 = plane_at(tables.planes[2], code, in_upper_half);
  const auto byte3 = plane_at(tables.planes[3], code, in_upper_half);
  const auto low0 = hn::BitCast(halves, hn::InterleaveLower(d, byte0, byte1));
  const auto low1 = hn::BitCast(halves, hn::InterleaveUpper(d, byte0, byte1));
  const auto high0 = hn::BitCast(halves, hn::InterleaveLower(d, byte2, byte3));
  const auto high1 = hn::BitCast(halves, hn::InterleaveUpper(d, byte2, byte3));
  return {{hn::BitCast(Floats(), hn::InterleaveLower(halves, low0, high0)),
           hn::BitCast(Floats(), hn::InterleaveUpper(halves, low0, high0)),
           hn::BitCast(Floats(), hn::InterleaveLower(halves, low1, high1)),
           hn::BitCast(Floats(), hn::InterleaveUpper(halves, low1, high1))}};
}
#else
template <EightBitCode kCode>
HWY_INLINE Four decoded_four(const EightBitTables& tables, const std::uint8_t* codes) {
  return {{decoded<kCode>(tables, codes), decoded<kCode>(tables, codes + kLanes),
           decoded<kCode>(tables, codes + 2 * kLanes), decoded<kCode>(tables, codes + 3 * kLanes)}};
}
#endif

/// Returns the section of eight_bit_tables.h in which a magnitude lies.
HWY_INLINE W section_of(const EightBitTables& tables, F magnitude) {
  const auto upper = hn::BitCast(Halves(), hn::ShiftRight<16>(hn::BitCast(Words(), magnitude)));
  const auto first = hn::BitCast(Halves(), hn::Set(Words(), kSectionFirst));
  const auto factor = hn::BitCast(Halves(), hn::Set(Words(), kSectionFactor));
  const W section = hn::BitCast(Words(), hn::MulHigh(hn::SaturatedSub(upper, first), factor));
  const FloatMask above = hn::Gt(magnitude, Choice(section).in(tables.section_end));
  const W next = hn::Add(section, hn::Set(Words(), 1u));
  return hn::IfThenElse(hn::RebindMask(Words(), above), next, section);
}

/// Codes in the lowest bytes, and the distance of the values from their ranks, as a magnitude.
struct Encoded {
  W codes;
  F off;
};
template <EightBitCode kCode>
HWY_INLINE Encoded encoded(const EightBitTables& tables, F value, F inverse) {
  const Floats d;
  const F magnitude = hn::Abs(hn::Mul(value, inverse));
  const Choice section(section_of(tables, magnitude));
  const F rise = hn::Mul(section.in(tables.rank_slope), magnitude);
  const F on_line = hn::Add(section.in(tables.rank_offset), rise);
  F place = hn::Min(on_line, section.in(tables.rank_limit));
  // Added to shift values to where floats are whole numbers, so that the sum is rounded and its
  // lower bits are the code.
  constexpr float kWhole = 0x1.8p23f;
  float up = kWhole;
  if (kCode == EightBitCode::kSigned) {
    const F lowest = hn::Set(d, -static_cast<float>(kSignedZero));  // -1 has no code
    place = hn::Max(hn::CopySignToAbs(place, value), lowest);
    up += static_cast<float>(kSignedZero);
  }
  const F shifted = hn::Add(place, hn::Set(d, up));
  const F off = hn::Abs(hn::Sub(place, hn::Sub(shifted, hn::Set(d, up))));
  const W codes = hn::BitCast(Words(), shifted);
  if (kCode == EightBitCode::kSigned) return {codes, off};
  const FloatMask above_zero = hn::Gt(value, hn::Zero(d));
  return {hn::IfThenElseZero(hn::RebindMask(Words(), above_zero), codes), off};
}

HWY_INLINE void store_codes(W codes, std::uint8_t* out) {
  hn::StoreU(hn::U8FromU32(hn::And(codes, hn::Set(Words(), 0xffu))), Codes(), out);
}

/// Encodes again, by the specification, those of kLanes values that are half-way between ranks.
template <EightBitCode kCode>
HWY_NOINLINE void encode_unsure(F off, const float* values, float inverse, std::uint8_t* codes) {
  alignas(64) float offs[kLanes];
  hn::Store(off, Floats(), offs);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    if (offs[lane] > 0.5f - kRankMargin)
      codes[lane] = scalar::eight_bit_code(kCode, values[lane], inverse);
  }
}

/// Encodes a block of finite values.
template <EightBitCode kCode>
HWY_INLINE void encode_block(const EightBitTables& tables, const float* values, float inverse,
                             std::uint8_t* codes) {
  const F by = hn::Set(Floats(), inverse);
  const F unsure = hn::Set(Floats(), 0.5f - kRankMargin);
  for (std::size_t i = 0; i < kEightBitBlock; i += kPair) {
    const Encoded low = encoded<kCode>(tables, hn::LoadU(Floats(), values + i), by);
    const Encoded high = encoded<kCode>(tables, hn::LoadU(Floats(), values + i + kLanes), by);
    store_codes(low.codes, codes + i);
    store_codes(high.codes, codes + i + kLanes);
    // Happens once in some hundred pairs.
    if (HWY_UNLIKELY(!hn::AllFalse(Floats(), hn::Gt(hn::Max(low.off, high.off), unsure)))) {
      encode_unsure<kCode>(low.off, values + i, inverse, codes + i);
      encode_unsure<kCode>(high.off, values + i + kLanes, inverse, codes + i + kLanes);
    }
  }
}

/// Returns the larger of `largest` and the magnitudes of `values`, as bits: in the order of bits,
/// NaN is the largest.
HWY_INLINE W largest_bits(W largest, Pair values) {
  const W low = hn::BitCast(Words(), hn::Abs(values.low));
  const W high = hn::BitCast(Words(), hn::Abs(values.high));
  return hn::Max(largest, hn::Max(low, high));
}

HWY_INLINE BlockScale scale_of(W largest) {
  return block_scale(hn::GetLane(hn::MaxOfLanes(Words(), largest)));
}

/// Stores codes and scale of a block.
template <EightBitCode kCode>
HWY_INLINE void finish_block(const EightBitTables& tables, BlockScale block, const float* values,
                             std::uint8_t* codes, float* scale) {
  if (HWY_UNLIKELY(!(block.scale >= 0.0f)))
    return scalar::encode_eight_bit(kCode, values, {codes, kEightBitBlock}, scale);
  *scale = block.scale;
  encode_block<kCode>(tables, values, block.inverse, codes);
}

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZIGGURAT_HAVE_VECTORS
#endif  // include guard per target
