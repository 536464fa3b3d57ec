// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw_simd.cc: adamw_scalar.cc's operations, in its order, for every target that
// Highway compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/adamw_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "optimizer/kernels.h"
#include "optimizer/simd_target.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 || HWY_HAVE_SCALABLE
// Never chosen where the target is emulated; correct, and not yet vectorized, where registers have
// no fixed size.
void adamw_simd(const AdamWStep& step, const AdamWSlice& slice) { scalar::adamw(step, slice); }
#else

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;     // as many 32-bit lanes
using Halves = hn::Repartition<bf16, Floats>;   // twice as many 16-bit lanes: a full register
using HalfRegister = hn::Rebind<bf16, Floats>;  // as many 16-bit lanes
using F = hn::Vec<Floats>;
constexpr std::size_t kLanes = hn::MaxLanes(Floats());

HWY_INLINE F quiet(F value) {
  const F nan = hn::BitCast(Floats(), hn::Set(Words(), kNaNBits));
  return hn::IfThenElse(hn::IsNaN(value), nan, value);
}

/// Updates kLanes elements from index i on and returns the new masters.
HWY_INLINE F update(const AdamWStep& step, const AdamWSlice& slice, std::size_t i) {
  const Floats d;
  const auto wide = hn::PromoteTo(Words(), hn::LoadU(HalfRegister(), slice.grad + i));
  const F gradient = hn::BitCast(d, hn::ShiftLeft<16>(wide));
  const F g = hn::Mul(gradient, hn::Set(d, step.grad_scale));

  const F m_kept = hn::Mul(hn::Set(d, step.beta1), hn::LoadU(d, slice.exp_avg + i));
  const F m = hn::Add(m_kept, hn::Mul(hn::Set(d, step.one_minus_beta1), g));

  const F v_kept = hn::Mul(hn::Set(d, step.beta2), hn::LoadU(d, slice.exp_avg_sq + i));
  const F v_scaled = hn::Mul(hn::Set(d, step.one_minus_beta2), g);
  const F v = hn::Add(v_kept, hn::Mul(v_scaled, g));

  const F corrected = hn::Mul(hn::Sqrt(v), hn::Set(d, step.inv_bias2_sqrt));
  const F denominator = hn::Add(corrected, hn::Set(d, step.eps));
  const F change = hn::Mul(hn::Div(m, denominator), hn::Set(d, step.step_size));

  const F decayed = hn::Mul(hn::LoadU(d, slice.master + i), hn::Set(d, slice.decay_factor));
  const F master = quiet(hn::Sub(decayed, change));

  hn::StoreU(quiet(m), d, slice.exp_avg + i);
  hn::StoreU(quiet(v), d, slice.exp_avg_sq + i);
  hn::StoreU(master, d, slice.master + i);
  return master;
}

/// The upper 16 bits of each lane are its bf16. The only NaN that comes here (kNaNBits) survives
/// the addition.
HWY_INLINE hn::Vec<Halves> rounded(F master) {
  const auto bits = hn::Add(hn::BitCast(Words(), master), hn::Set(Words(), 0x8000u));
  return hn::BitCast(Halves(), bits);
}

void adamw_simd(const AdamWStep& step_in, const AdamWSlice& slice_in) {
  // Copies whose address nobody has, so that the broadcast constants stay in registers across the
  // stores.
  const AdamWStep step = step_in;
  const AdamWSlice slice = slice_in;
  std::size_t i = 0;
  for (; i + 2 * kLanes <= slice.count; i += 2 * kLanes) {
    const auto low = rounded(update(step, slice, i));
    const auto high = rounded(update(step, slice, i + kLanes));
    // Odd 16-bit lanes are the upper halves of 32-bit lanes; this keeps their order on every
    // target.
    hn::StoreU(hn::ConcatOdd(Halves(), high, low), Halves(), slice.param + i);
  }
  scalar::adamw(step, {.master = slice.master + i,
                       .exp_avg = slice.exp_avg + i,
                       .exp_avg_sq = slice.exp_avg_sq + i,
                       .grad = slice.grad + i,
                       .param = slice.param + i,
                       .count = slice.count - i,
                       .decay_factor = slice.decay_factor});
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(adamw_simd);

void adamw(const AdamWStep& step, const AdamWSlice& slice) {
  select_kernel(scalar::adamw, HWY_DISPATCH_TABLE(adamw_simd))(step, slice);
}

}  // namespace ziggurat::internal
#endif
