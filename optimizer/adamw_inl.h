// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw_inl.h: adamw_scalar.cc's operations, in its order, on a register full of
// elements. Included once per target.
#if defined(ZIGGURAT_OPTIMIZER_ADAMW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_OPTIMIZER_ADAMW_INL_H_
#undef ZIGGURAT_OPTIMIZER_ADAMW_INL_H_
#else
#define ZIGGURAT_OPTIMIZER_ADAMW_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "optimizer/kernels.h"

#undef ZIGGURAT_HAVE_VECTORS
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 || HWY_HAVE_SCALABLE
#define ZIGGURAT_HAVE_VECTORS 0  // emulated, or of no fixed size: the specification is used instead
#else
#define ZIGGURAT_HAVE_VECTORS 1

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;     // as many 32-bit lanes
using Halves = hn::Repartition<bf16, Floats>;   // twice as many 16-bit lanes: a full register
using HalfRegister = hn::Rebind<bf16, Floats>;  // as many 16-bit lanes
using F = hn::Vec<Floats>;
constexpr std::size_t kLanes = hn::MaxLanes(Floats());

/// The state of kLanes elements.
struct Elements {
  F master, exp_avg, exp_avg_sq;
};

HWY_INLINE Elements load(const AdamWSlice& slice, std::size_t i) {
  const Floats d;
  return {hn::LoadU(d, slice.master + i), hn::LoadU(d, slice.exp_avg + i),
          hn::LoadU(d, slice.exp_avg_sq + i)};
}

HWY_INLINE void store(const Elements& elements, const AdamWSlice& slice, std::size_t i) {
  const Floats d;
  hn::StoreU(elements.master, d, slice.master + i);
  hn::StoreU(elements.exp_avg, d, slice.exp_avg + i);
  hn::StoreU(elements.exp_avg_sq, d, slice.exp_avg_sq + i);
}

HWY_INLINE F load_gradient(const AdamWSlice& slice, std::size_t i) {
  const auto wide = hn::PromoteTo(Words(), hn::LoadU(HalfRegister(), slice.grad + i));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(wide));
}

HWY_INLINE F quiet(F value) {
  const F nan = hn::BitCast(Floats(), hn::Set(Words(), kNaNBits));
  return hn::IfThenElse(hn::IsNaN(value), nan, value);
}

HWY_INLINE Elements updated(const AdamWStep& step, float decay_factor, const Elements& old,
                            F gradient) {
  const Floats d;
  const F g = hn::Mul(gradient, hn::Set(d, step.grad_scale));

  const F m_kept = hn::Mul(hn::Set(d, step.beta1), old.exp_avg);
  const F m = hn::Add(m_kept, hn::Mul(hn::Set(d, step.one_minus_beta1), g));

  const F v_kept = hn::Mul(hn::Set(d, step.beta2), old.exp_avg_sq);
  const F v_scaled = hn::Mul(hn::Set(d, step.one_minus_beta2), g);
  const F v = hn::Add(v_kept, hn::Mul(v_scaled, g));

  const F corrected = hn::Mul(hn::Sqrt(v), hn::Set(d, step.inv_bias2_sqrt));
  const F denominator = hn::Add(corrected, hn::Set(d, step.eps));
  const F update = hn::Mul(hn::Div(m, denominator), hn::Set(d, step.step_size));

  const F decayed = hn::Mul(old.master, hn::Set(d, decay_factor));
  return {quiet(hn::Sub(decayed, update)), quiet(m), quiet(v)};
}

/// Rounds 2 * kLanes new masters into slice.param. The only NaN that comes here (kNaNBits) survives
/// the addition.
template <bool kPastCache>
HWY_INLINE void store_params(F low, F high, const AdamWSlice& slice, std::size_t i) {
  const auto half = hn::Set(Words(), 0x8000u);
  const auto low_bits = hn::BitCast(Halves(), hn::Add(hn::BitCast(Words(), low), half));
  const auto high_bits = hn::BitCast(Halves(), hn::Add(hn::BitCast(Words(), high), half));
  // Odd 16-bit lanes are the upper halves of 32-bit lanes; taking them so keeps their order on
  // every target.
  const auto packed = hn::ConcatOdd(Halves(), high_bits, low_bits);
  if (kPastCache) {
    hn::Stream(packed, Halves(), slice.param + i);
  } else {
    hn::StoreU(packed, Halves(), slice.param + i);
  }
}

/// Parameters are only written here, so storing them past the cache saves reading their lines
/// first: 2 of 30 bytes an element. Not for few of them, which somebody may want soon, nor for
/// addresses that Stream cannot take.
HWY_INLINE bool store_params_past_cache(const AdamWSlice& slice) {
  constexpr std::size_t kFew = 4096;
  return slice.count >= kFew &&
         reinterpret_cast<std::uintptr_t>(slice.param) % (kLanes * sizeof(float)) == 0;
}

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZIGGURAT_HAVE_VECTORS
#endif  // include guard per target
