// SPDX-License-Identifier: Apache-2.0
// optimizer/rules_inl.h: the arithmetic of optimizers.h, in its order, on registers of elements,
// with one rule per optimizer. Included once per target.
#if defined(ZIGGURAT_OPTIMIZER_RULES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIGGURAT_OPTIMIZER_RULES_INL_H_
#undef ZIGGURAT_OPTIMIZER_RULES_INL_H_
#else
#define ZIGGURAT_OPTIMIZER_RULES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "base/numerics/registers_inl.h"
#include "optimizer/kernels.h"

#if ZIGGURAT_HAVE_VECTORS

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

/// The state of kLanes elements. Rules with one moment do not change the second.
struct Elements {
  F master, moment, second;
};

HWY_INLINE F scaled(const OptimizerStep& step, F gradient) {
  return hn::Mul(gradient, hn::Set(Floats(), step.grad_scale));
}

/// Returns the scaled gradient with decay as a penalty.
HWY_INLINE F penalised(const OptimizerStep& step, float decay, F master, F gradient) {
  return hn::Add(scaled(step, gradient), hn::Mul(master, hn::Set(Floats(), decay)));
}

HWY_INLINE Elements adam(const OptimizerStep& step, const Elements& old, F g, F decayed) {
  const Floats d;
  const F m_kept = hn::Mul(hn::Set(d, step.beta1), old.moment);
  const F m = hn::Add(m_kept, hn::Mul(hn::Set(d, step.one_minus_beta1), g));

  const F v_kept = hn::Mul(hn::Set(d, step.beta2), old.second);
  const F v_scaled = hn::Mul(hn::Set(d, step.one_minus_beta2), g);
  const F v = hn::Add(v_kept, hn::Mul(v_scaled, g));

  const F corrected = hn::Mul(hn::Sqrt(v), hn::Set(d, step.inv_bias2_sqrt));
  const F denominator = hn::Add(corrected, hn::Set(d, step.eps));
  const F update = hn::Mul(hn::Div(m, denominator), hn::Set(d, step.step_size));
  return {quiet(hn::Sub(decayed, update)), quiet(m), quiet(v)};
}

struct AdamWRule {
  static constexpr OptimizerKind kKind = OptimizerKind::kAdamW;
  static HWY_INLINE Elements updated(const OptimizerStep& step, float decay, const Elements& old,
                                     F gradient) {
    const F decayed = hn::Mul(old.master, hn::Set(Floats(), decay));
    return adam(step, old, scaled(step, gradient), decayed);
  }
};

struct AdamRule {
  static constexpr OptimizerKind kKind = OptimizerKind::kAdam;
  static HWY_INLINE Elements updated(const OptimizerStep& step, float decay, const Elements& old,
                                     F gradient) {
    return adam(step, old, penalised(step, decay, old.master, gradient), old.master);
  }
};

struct LionRule {
  static constexpr OptimizerKind kKind = OptimizerKind::kLion;
  static HWY_INLINE Elements updated(const OptimizerStep& step, float decay, const Elements& old,
                                     F gradient) {
    const Floats d;
    const F g = scaled(step, gradient);
    const F c_kept = hn::Mul(hn::Set(d, step.beta1), old.moment);
    const F c = hn::Add(c_kept, hn::Mul(hn::Set(d, step.one_minus_beta1), g));
    const F zero = hn::Zero(d);
    const F below = hn::IfThenElse(hn::Lt(c, zero), hn::Set(d, -1.0f), c);
    const F sign = hn::IfThenElse(hn::Gt(c, zero), hn::Set(d, 1.0f), below);
    const F update = hn::Mul(sign, hn::Set(d, step.step_size));
    const F decayed = hn::Mul(old.master, hn::Set(d, decay));

    const F m_kept = hn::Mul(hn::Set(d, step.beta2), old.moment);
    const F m = hn::Add(m_kept, hn::Mul(hn::Set(d, step.one_minus_beta2), g));
    return {quiet(hn::Sub(decayed, update)), quiet(m), old.second};
  }
};

struct AdagradRule {
  static constexpr OptimizerKind kKind = OptimizerKind::kAdagrad;
  static HWY_INLINE Elements updated(const OptimizerStep& step, float decay, const Elements& old,
                                     F gradient) {
    const Floats d;
    const F g = penalised(step, decay, old.master, gradient);
    const F sum = hn::Add(old.moment, hn::Mul(g, g));
    const F denominator = hn::Add(hn::Sqrt(sum), hn::Set(d, step.eps));
    const F update = hn::Mul(hn::Div(g, denominator), hn::Set(d, step.step_size));
    return {quiet(hn::Sub(old.master, update)), quiet(sum), old.second};
  }
};

struct SgdRule {
  static constexpr OptimizerKind kKind = OptimizerKind::kSgd;
  static HWY_INLINE Elements updated(const OptimizerStep& step, float decay, const Elements& old,
                                     F gradient) {
    const Floats d;
    const F g = penalised(step, decay, old.master, gradient);
    const F beta1 = hn::Set(d, step.beta1);
    const F added = hn::Mul(hn::Set(d, step.gradient_weight), g);
    const F momentum = hn::Add(hn::Mul(beta1, old.moment), added);
    F direction = momentum;
    if (step.nesterov) direction = hn::Add(g, hn::Mul(beta1, momentum));
    const F update = hn::Mul(direction, hn::Set(d, step.step_size));
    return {quiet(hn::Sub(old.master, update)), quiet(momentum), old.second};
  }
};

/// Calls `with` with the rule of an optimizer.
template <class With>
HWY_INLINE void with_rule(OptimizerKind kind, With with) {
  switch (kind) {
    case OptimizerKind::kAdamW: return with(AdamWRule());
    case OptimizerKind::kAdam: return with(AdamRule());
    case OptimizerKind::kLion: return with(LionRule());
    case OptimizerKind::kAdagrad: return with(AdagradRule());
    case OptimizerKind::kSgd: return with(SgdRule());
  }
}

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZIGGURAT_HAVE_VECTORS
#endif  // include guard per target
