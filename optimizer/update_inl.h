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

template <class Rule, class Masters, class Moments>
HWY_INLINE ElementsPair load_elements(const Slice& slice, std::size_t i) {
  const Pair master = Masters::load(slice, i);
  const Pair moment = Moments::load(slice.moments[0], i);
  const Pair second = Rule::kMoments == 2 ? Moments::load(slice.moments[1], i) : moment;
  return {{master.low, moment.low, second.low}, {master.high, moment.high, second.high}};
}

template <class Rule, class Masters, class Moments>
HWY_INLINE void store_elements(const ElementsPair& pair, const Noise& noise, bool past_cache,
                               const Slice& slice, std::size_t i) {
  const Pair master{pair.low.master, pair.high.master};
  Masters::store(master, noise.param, slice, i);
  Moments::store({pair.low.moment, pair.high.moment}, noise.moment, slice.moments[0], i);
  if (Rule::kMoments == 2)
    Moments::store({pair.low.second, pair.high.second}, noise.second, slice.moments[1], i);
  if (slice.param != nullptr) store_param(master, noise.param, past_cache, slice, i);
}

template <class Rule, class Masters, class Moments>
void update_by_rule(const OptimizerStep& step_in, const Slice& slice_in) {
  // Copies whose address nobody has, so that the broadcast constants stay in registers across the
  // stores.
  const OptimizerStep step = step_in;
  const Slice slice = slice_in;
  const bool stochastic = step.rounding == Rounding::kStochastic;
  const bool past_cache = store_params_past_cache(slice);
  std::size_t i = 0;
  for (; i + kPair <= slice.count; i += kPair) {
    const ElementsPair old = load_elements<Rule, Masters, Moments>(slice, i);
    const Pair gradient = load_gradient(slice, i);
    const ElementsPair made{Rule::updated(step, slice.decay, old.low, gradient.low),
                            Rule::updated(step, slice.decay, old.high, gradient.high)};
    const Noise noise = noise_of < Rule::kMoments == 2 && Moments::kRounds > (stochastic, slice, i);
    store_elements<Rule, Masters, Moments>(made, noise, past_cache, slice, i);
  }
  scalar::update(step, part_of(slice, i, slice.count));
}

template <class Masters, class Moments>
void update_arrays(const OptimizerStep& step, const Slice& slice) {
  switch (step.kind) {
    case OptimizerKind::kAdamW: return update_by_rule<AdamWRule, Masters, Moments>(step, slice);
    case OptimizerKind::kAdam: return update_by_rule<AdamRule, Masters, Moments>(step, slice);
    case OptimizerKind::kLion: return update_by_rule<LionRule, Masters, Moments>(step, slice);
    case OptimizerKind::kAdagrad: return update_by_rule<AdagradRule, Masters, Moments>(step, slice);
    case OptimizerKind::kSgd: return update_by_rule<SgdRule, Masters, Moments>(step, slice);
  }
}

#else

struct Fp32Masters;
struct SplitMasters;
struct Bf16Masters;
struct Fp32Moments;
struct Bf16Moments;

template <class Masters, class Moments>
void update_arrays(const OptimizerStep& step, const Slice& slice) {
  scalar::update(step, slice);
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
