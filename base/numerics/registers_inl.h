// SPDX-License-Identifier: Apache-2.0
// base/numerics/registers_inl.h: loads arrays of fp32, bf16 and fp16 into registers of fp32, two at
// a time, widened exactly, and rounds them with the bits of rounding.h and float16.h. Included once
// per target.
#if defined(ZIGGURAT_NUMERICS_REGISTERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_NUMERICS_REGISTERS_INL_H_
#undef ZIGGURAT_NUMERICS_REGISTERS_INL_H_
#else
#define ZIGGURAT_NUMERICS_REGISTERS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/numerics/float16_inl.h"
#include "base/numerics/rounding.h"

#undef ZIGGURAT_HAVE_VECTORS
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 || HWY_HAVE_SCALABLE
#define ZIGGURAT_HAVE_VECTORS 0  // emulated or of no fixed size: the specification is used
#else
#define ZIGGURAT_HAVE_VECTORS 1

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;  // the same number of 32-bit lanes
using F = hn::Vec<Floats>;
using W = hn::Vec<Words>;
constexpr std::size_t kLanes = hn::MaxLanes(Floats());

HWY_INLINE F quiet(F value) {
  const F nan = hn::BitCast(Floats(), hn::Set(Words(), kNaNBits));
  return hn::IfThenElse(hn::IsNaN(value), nan, value);
}

using Halves = hn::Repartition<std::uint16_t, Floats>;   // twice the number of 16-bit lanes
using HalfRegister = hn::Rebind<std::uint16_t, Floats>;  // the same number of 16-bit lanes
using SignedHalf = hn::Rebind<std::int16_t, Floats>;
using SignedWords = hn::RebindToSigned<Floats>;
constexpr std::size_t kPair = 2 * kLanes;

/// Holds 2 * kLanes values.
struct Pair {
  F low, high;
};
struct WordPair {
  W low, high;
};

HWY_INLINE Pair load_fp32(const void* array, std::size_t i) {
  const auto* from = static_cast<const float*>(array) + i;
  return {hn::LoadU(Floats(), from), hn::LoadU(Floats(), from + kLanes)};
}
HWY_INLINE void store_fp32(Pair values, void* array, std::size_t i) {
  auto* to = static_cast<float*>(array) + i;
  hn::StoreU(values.low, Floats(), to);
  hn::StoreU(values.high, Floats(), to + kLanes);
}

HWY_INLINE WordPair load_halves(const void* array, std::size_t i) {
  const auto* from = static_cast<const std::uint16_t*>(array) + i;
  return {hn::PromoteTo(Words(), hn::LoadU(HalfRegister(), from)),
          hn::PromoteTo(Words(), hn::LoadU(HalfRegister(), from + kLanes))};
}
/// Returns the upper halves of the words.
HWY_INLINE hn::Vec<Halves> upper_halves(WordPair words) {
  // Odd 16-bit lanes are the upper halves of 32-bit lanes. ConcatOdd keeps their order on every
  // target.
  return hn::ConcatOdd(Halves(), hn::BitCast(Halves(), words.high),
                       hn::BitCast(Halves(), words.low));
}

HWY_INLINE F widen_bf16(W half) { return hn::BitCast(Floats(), hn::ShiftLeft<16>(half)); }
/// Adds noise; the caller then cuts off the lower halves. The only NaN that gets here (kNaNBits)
/// survives the addition.
HWY_INLINE WordPair with_noise(Pair values, WordPair noise) {
  return {hn::Add(hn::BitCast(Words(), values.low), noise.low),
          hn::Add(hn::BitCast(Words(), values.high), noise.high)};
}

/// A way to place elements in a pair of registers: the first half in one, the second half in the
/// other.
struct InOrder {
  static HWY_INLINE Pair load_bf16(const void* array, std::size_t i) {
    const WordPair halves = load_halves(array, i);
    return {widen_bf16(halves.low), widen_bf16(halves.high)};
  }
  static HWY_INLINE hn::Vec<Halves> rounded_bf16(Pair values, WordPair noise) {
    return upper_halves(with_noise(values, noise));
  }
  /// Returns the numbers of the elements from `first` on.
  static HWY_INLINE WordPair indices(std::uint32_t first) {
    const Words d;
    return {hn::Iota(d, first), hn::Iota(d, first + static_cast<std::uint32_t>(kLanes))};
  }
};

/// A way to place elements in a pair of registers: the even ones in one, the odd ones in the other.
/// If all arrays are bf16, nothing has to move between lanes when elements are loaded or stored.
struct EvenOdd {
  static HWY_INLINE Pair load_bf16(const void* array, std::size_t i) {
    const W both =
        hn::BitCast(Words(), hn::LoadU(Halves(), static_cast<const std::uint16_t*>(array) + i));
    return {widen_bf16(both), hn::BitCast(Floats(), hn::And(both, hn::Set(Words(), 0xffff0000u)))};
  }
  static HWY_INLINE hn::Vec<Halves> rounded_bf16(Pair values, WordPair noise) {
    const WordPair sums = with_noise(values, noise);
    return hn::OddEven(hn::BitCast(Halves(), sums.high),
                       hn::BitCast(Halves(), hn::ShiftRight<16>(sums.low)));
  }
  static HWY_INLINE WordPair indices(std::uint32_t first) {
    const Words d;
    const W even = hn::Add(hn::ShiftLeft<1>(hn::Iota(d, 0u)), hn::Set(d, first));
    return {even, hn::Add(even, hn::Set(d, 1u))};
  }
};

HWY_INLINE void store_halves(hn::Vec<Halves> halves, void* array, std::size_t i) {
  hn::StoreU(halves, Halves(), static_cast<std::uint16_t*>(array) + i);
}

HWY_INLINE F widen_fp16(W half) { return float16::HWY_NAMESPACE::widen(Floats(), half); }
/// Does float_to_fp16, into the upper halves.
HWY_INLINE W round_fp16(F value) {
  return hn::ShiftLeft<16>(float16::HWY_NAMESPACE::round(Floats(), value));
}

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZIGGURAT_HAVE_VECTORS
#endif  // include guard per target
