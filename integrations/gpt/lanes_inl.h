// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/lanes_inl.h: the building blocks of kernels.cc, compiled once per SIMD target:
// blocks of 16 floats, loads and stores of every element type, exp, and sums over 16 virtual lanes.
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/numerics/float16.h"
#include "base/numerics/float16_inl.h"
#include "hwy/highway.h"

#if defined(ZIGGURAT_GPT_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_GPT_LANES_INL_H_
#undef ZIGGURAT_GPT_LANES_INL_H_
#else
#define ZIGGURAT_GPT_LANES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ziggurat::gpt::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kBlock = 16;
using F32 = hn::CappedTag<float, kBlock>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using Vec = hn::Vec<F32>;
inline constexpr std::size_t kLanes = hn::MaxLanes(F32());
inline constexpr std::size_t kVectors = kBlock / kLanes;  // of a block

// The element types: how an element lies in memory, and how a value is rounded to it. The
// conversions of single elements are for the ends of rows.
struct Bf16 {
  using Type = bf16;
  static HWY_INLINE Vec load(const Type* from) {
    const auto bits = hn::PromoteTo(U32(), hn::LoadU(U16(), from));
    return hn::BitCast(F32(), hn::ShiftLeft<16>(bits));
  }
  // Rounds as float_to_bf16() of base/dtype.h does: to nearest, ties away, NaN made quiet.
  static HWY_INLINE void store(Vec value, Type* to) {
    const U32 u32;
    const auto bits = hn::BitCast(u32, value);
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Set(u32, 0x8000u)));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u32, 0x40u));
    const auto is_nan = hn::RebindMask(u32, hn::IsNaN(value));
    hn::StoreU(hn::TruncateTo(U16(), hn::IfThenElse(is_nan, quiet, rounded)), U16(), to);
  }
  static HWY_INLINE Vec round(Vec value) {
    const U32 u32;
    const auto bits = hn::BitCast(u32, value);
    const auto rounded = hn::And(hn::Add(bits, hn::Set(u32, 0x8000u)), hn::Set(u32, 0xffff0000u));
    return hn::IfThenElse(hn::IsNaN(value), value, hn::BitCast(F32(), rounded));
  }
  static HWY_INLINE float widen(Type value) { return bf16_to_float(value); }
  static HWY_INLINE Type narrow(float value) { return float_to_bf16(value); }
};

struct Fp16 {
  using Type = fp16;
  static HWY_INLINE Vec load(const Type* from) {
    return float16::HWY_NAMESPACE::widen(F32(), hn::PromoteTo(U32(), hn::LoadU(U16(), from)));
  }
  static HWY_INLINE void store(Vec value, Type* to) {
    hn::StoreU(hn::TruncateTo(U16(), float16::HWY_NAMESPACE::round(F32(), value)), U16(), to);
  }
  static HWY_INLINE Vec round(Vec value) {
    return float16::HWY_NAMESPACE::widen(F32(), float16::HWY_NAMESPACE::round(F32(), value));
  }
  static HWY_INLINE float widen(Type value) { return fp16_to_float(value); }
  static HWY_INLINE Type narrow(float value) { return float_to_fp16(value); }
};

struct Fp32 {
  using Type = float;
  static HWY_INLINE Vec load(const Type* from) { return hn::LoadU(F32(), from); }
  static HWY_INLINE void store(Vec value, Type* to) { hn::StoreU(value, F32(), to); }
  static HWY_INLINE Vec round(Vec value) { return value; }
  static HWY_INLINE float widen(Type value) { return value; }
  static HWY_INLINE Type narrow(float value) { return value; }
};

// Returns e^x, with x clamped to [-87, 88] and a relative error below 3e-7: splits off n =
// nearest(x / ln 2), and takes a Taylor polynomial of degree 6 of the rest.
HWY_INLINE Vec exp_clamped(Vec x) {
  const F32 d;
  const Vec magic = hn::Set(d, 12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  x = hn::Min(hn::Max(x, hn::Set(d, -87.0F)), hn::Set(d, 88.0F));
  const Vec n = hn::Sub(hn::Add(hn::Mul(x, hn::Set(d, 1.44269504F)), magic), magic);
  // ln 2 comes in two parts, of which the first has 9 bits, so that n times it is exact.
  Vec r = hn::Sub(x, hn::Mul(n, hn::Set(d, 0.693359375F)));
  r = hn::Sub(r, hn::Mul(n, hn::Set(d, -2.12194440e-4F)));
  Vec p = hn::Set(d, 1.0F / 720);
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.0F / 120));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.0F / 24));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.0F / 6));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 0.5F));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.0F));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.0F));
  const I32 i32;
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(i32, n), hn::Set(i32, 127)));
  return hn::Mul(p, hn::BitCast(d, exponent));
}

// The tanh form of gelu(x) is x * sigmoid(x * (c1 + c3 x^2)). These constants are c1 = 2 sqrt(2 /
// pi), and c3 = 0.044715 c1.
inline constexpr float kGelu1 = 1.5957691216057308F;
inline constexpr float kGelu3 = 0.0713548162726009F;

HWY_INLINE Vec gelu_sigmoid(Vec x, Vec x2) {
  const F32 d;
  const Vec z = hn::Mul(x, hn::Add(hn::Set(d, kGelu1), hn::Mul(hn::Set(d, kGelu3), x2)));
  const Vec one = hn::Set(d, 1.0F);
  return hn::Div(one, hn::Add(one, exp_clamped(hn::Neg(z))));
}

HWY_INLINE Vec gelu(Vec x) { return hn::Mul(x, gelu_sigmoid(x, hn::Mul(x, x))); }

HWY_INLINE Vec gelu_derivative(Vec x) {
  const F32 d;
  const Vec x2 = hn::Mul(x, x);
  const Vec s = gelu_sigmoid(x, x2);
  const Vec slope = hn::Add(hn::Set(d, kGelu1), hn::Mul(hn::Set(d, 3 * kGelu3), x2));
  return hn::Add(s, hn::Mul(hn::Mul(x, hn::Mul(s, hn::Sub(hn::Set(d, 1.0F), s))), slope));
}

// Holds 16 running sums (or maxima), whatever the vector's width.
struct Lanes16 {
  Vec v[kVectors];

  HWY_INLINE void fill(float value) {
    for (std::size_t i = 0; i < kVectors; ++i) v[i] = hn::Set(F32(), value);
  }
  HWY_INLINE void to_array(float* lanes) const {
    for (std::size_t i = 0; i < kVectors; ++i) hn::StoreU(v[i], F32(), lanes + i * kLanes);
  }
  // Adds in a fixed tree, halves onto halves: 16 to 8 to 4 to 2 to 1.
  HWY_INLINE float sum() const {
    float lanes[kBlock];
    to_array(lanes);
    return tree_sum(lanes);
  }
  HWY_INLINE float max() const {
    float lanes[kBlock];
    to_array(lanes);
    for (std::size_t half = kBlock / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i)
        lanes[i] = lanes[i] < lanes[i + half] ? lanes[i + half] : lanes[i];
    }
    return lanes[0];
  }
  static HWY_INLINE float tree_sum(float* lanes) {
    for (std::size_t half = kBlock / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    }
    return lanes[0];
  }
};

}  // namespace ziggurat::gpt::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
