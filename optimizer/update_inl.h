// SPDX-License-Identifier: Apache-2.0
// optimizer/update_inl.h: the pass over a slice: any rule (rules_inl.h) on any arrays
// (arrays_inl.h), in registers from load to store. Included once per target.
#if defined(ZIGGURAT_OPTIMIZER_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_OPTIMIZER_UPDATE_INL_H_
#undef ZIGGURAT_OPTIMIZER_UPDATE_INL_H_
#else
#define ZIGGURAT_OPTIMIZER_UPDATE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>

#include "optimizer/arrays_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/rules_inl.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS

/// Returns the rounding of nearly every run, which has gradients and parameters in bf16: state that
/// is kept in bf16 is rounded with noise, and parameters of fp32 masters to nearest.
template <class MastersIn, class MomentsIn>
constexpr Drawn common_drawn() {
  return {.param = MastersIn::kRounds, .moments = MomentsIn::kRounds};
}
template <class MastersIn, class MomentsIn>
bool is_common(Drawn drawn, const Slice& slice) {
  constexpr Drawn common = common_drawn<MastersIn, MomentsIn>();
  return drawn.param == common.param && drawn.moments == common.moments &&
         slice.grad_dtype == DType::kBFloat16 &&
         (slice.param == nullptr || slice.param_dtype == DType::kBFloat16);
}

/// Updates whole pairs of registers, and returns how many elements these have.
template <class Rule, class MastersIn, class MomentsIn, class Order, bool kCommon>
std::size_t update_pairs(const OptimizerStep& step_in, const Slice& slice_in) {
  // These are copies to which no pointer exists, so that the broadcast constants stay in registers
  // across the stores. In the common case the compiler also knows their values, and so has one path
  // whose values all fit the registers.
  const OptimizerStep step = step_in;
  Slice slice = slice_in;
  Drawn drawn = drawn_by(slice.format, step.rounding);
  if (kCommon) {
    drawn = common_drawn<MastersIn, MomentsIn>();
    slice.grad_dtype = DType::kBFloat16;
    slice.param_dtype = DType::kBFloat16;
  }
  const bool past_cache = store_params_past_cache(slice);
  constexpr std::size_t kMoments = moment_count(Rule::kKind);
  constexpr std::size_t kRounded = MomentsIn::kRounds ? kMoments : 0;
  std::size_t i = 0;
  for (; i + kPair <= slice.count; i += kPair) {
    const Pair master = MastersIn::load(slice, i);
    const Pair moment = MomentsIn::load(slice.moments[0], i);
    const Pair second = kMoments == 2 ? MomentsIn::load(slice.moments[1], i) : moment;
    const Pair gradient = load_gradient<Order>(slice, i);
    const Elements low =
        Rule::updated(step, slice.decay, {master.low, moment.low, second.low}, gradient.low);
    const Elements high =
        Rule::updated(step, slice.decay, {master.high, moment.high, second.high}, gradient.high);
    const Pair made{low.master, high.master};
    const Noise noise = noise_of<Order, kRounded>(drawn, slice, i);
    MastersIn::store(made, noise.param, slice, i);
    MomentsIn::store({low.moment, high.moment}, noise.moment, slice.moments[0], i);
    if (kMoments == 2)
      MomentsIn::store({low.second, high.second}, noise.second, slice.moments[1], i);
    if (slice.param != nullptr) store_param<Order>(made, noise.param, past_cache, slice, i);
  }
  return i;
}

template <class Rule, class MastersIn, class MomentsIn, class Order>
void update_by_rule(const OptimizerStep& step, const Slice& slice) {
  const bool common = is_common<MastersIn, MomentsIn>(drawn_by(slice.format, step.rounding), slice);
  const std::size_t done =
      common ? update_pairs<Rule, MastersIn, MomentsIn, Order, true>(step, slice)
             : update_pairs<Rule, MastersIn, MomentsIn, Order, false>(step, slice);
  scalar::update(step, part_of(slice, done, slice.count));
}

template <class MastersIn, class MomentsIn, class Order = InOrder>
void update_arrays(const OptimizerStep& step, const Slice& slice) {
  with_rule(step.kind, [&]<class Rule>(Rule) {
    update_by_rule<Rule, MastersIn, MomentsIn, Order>(step, slice);
  });
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
