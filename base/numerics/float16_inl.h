// SPDX-License-Identifier: Apache-2.0
// base/numerics/float16_inl.h: base/numerics/float16.h on registers, with the same bits on every
// target. The CPU's conversion instructions are not used: not all targets have them, and they
// differ for NaN. Included once per target.
#if defined(ZIGGURAT_BASE_FLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_BASE_FLOAT16_INL_H_
#undef ZIGGURAT_BASE_FLOAT16_INL_H_
#else
#define ZIGGURAT_BASE_FLOAT16_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace ziggurat::float16::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Does fp16_to_float of the lower 16 bits of each word; the upper 16 bits are zero.
template <class D, class Words = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<D> widen(D f, hn::Vec<Words> half) {
  const Words d;
  const auto magnitude = hn::And(half, hn::Set(d, 0x7fffu));
  const auto rebias = hn::Set(d, 112u << 23);
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const auto special =
      hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7bffu)), hn::Add(normal, rebias), normal);
  const auto shifted = hn::BitCast(f, hn::Add(normal, hn::Set(d, 1u << 23)));
  const auto denormal = hn::Sub(shifted, hn::Set(f, 0x1p-14f));
  const auto bits =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x0400u)), hn::BitCast(d, denormal), special);
  return hn::BitCast(f, hn::Or(bits, hn::ShiftLeft<16>(hn::Sub(half, magnitude))));
}

/// Does float_to_fp16 of each lane, into the lower 16 bits of a word; the upper 16 bits are zero.
template <class D, class Words = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<Words> round(D f, hn::Vec<D> value) {
  const Words d;
  const auto bits = hn::BitCast(d, value);
  const auto magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 0x8000u));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1u));
  const auto biased = hn::Add(magnitude, hn::Set(d, 0xfffu - (112u << 23)));
  const auto normal = hn::ShiftRight<13>(hn::Add(biased, odd));
  const auto shifted = hn::Add(hn::BitCast(f, magnitude), hn::Set(f, 0.5f));
  const auto denormal = hn::Sub(hn::BitCast(d, shifted), hn::Set(d, 0x3f000000u));
  auto half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 113u << 23)), denormal, normal);
  half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 143u << 23)), half, hn::Set(d, 0x7c00u));
  half = hn::Or(half, sign);
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7f800000u)), hn::Set(d, 0x7e00u), half);
}

}  // namespace ziggurat::float16::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // include guard per target
