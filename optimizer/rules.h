// SPDX-License-Identifier: Apache-2.0
// optimizer/rules.h: the specification of every optimizer: what a step makes of one element. The
// scalar kernel and CUDA's are compiled from it; register code (rules_inl.h) is compared with it.
//
// Every line of arithmetic below is one IEEE binary32 operation, rounded to nearest even, denormals
// kept, never fused (-ffp-contract=off, --fmad=false). To change the order of two of them would
// change the bits of every training run.
#pragma once

#include <cmath>

#include "base/numerics/host_device.h"
#include "base/numerics/rounding.h"
#include "optimizer/optimizer_step.h"
#include "optimizer/slice.h"

namespace ziggurat::internal {

/// The state of one element. Rules with one moment do not change the second.
struct Element {
  float master;
  float moments[kMomentsMax];
};

ZIGGURAT_HOST_DEVICE inline Element adam(const OptimizerStep& step, const Element& old, float g,
                                         float decayed) {
  const float m_kept = step.beta1 * old.moments[0];
  const float m_new = step.one_minus_beta1 * g;
  const float m = m_kept + m_new;

  const float v_kept = step.beta2 * old.moments[1];
  // (1 - beta2) g first: g * g would overflow from 1.8e19 on
  const float v_scaled = step.one_minus_beta2 * g;
  const float v_new = v_scaled * g;
  const float v = v_kept + v_new;

  const float root = std::sqrt(v);
  const float corrected = root * step.inv_bias2_sqrt;
  const float denominator = corrected + step.eps;
  const float direction = m / denominator;
  const float update = direction * step.step_size;
  return {decayed - update, {m, v}};
}

ZIGGURAT_HOST_DEVICE inline Element lion(const OptimizerStep& step, const Element& old, float g,
                                         float decay) {
  const float m = old.moments[0];
  const float c_kept = step.beta1 * m;
  const float c_new = step.one_minus_beta1 * g;
  const float c = c_kept + c_new;
  const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;  // 0 and NaN stay
  const float update = sign * step.step_size;
  const float decayed = old.master * decay;

  const float m_kept = step.beta2 * m;
  const float m_new = step.one_minus_beta2 * g;
  return {decayed - update, {m_kept + m_new, 0.0f}};
}

ZIGGURAT_HOST_DEVICE inline Element adagrad(const OptimizerStep& step, const Element& old,
                                            float g) {
  const float square = g * g;
  const float sum = old.moments[0] + square;
  const float root = std::sqrt(sum);
  const float denominator = root + step.eps;
  const float direction = g / denominator;
  const float update = direction * step.step_size;
  return {old.master - update, {sum, 0.0f}};
}

ZIGGURAT_HOST_DEVICE inline Element sgd(const OptimizerStep& step, const Element& old, float g) {
  const float kept = step.beta1 * old.moments[0];
  const float added = step.gradient_weight * g;  // a weight of 1 leaves every g as it is
  const float momentum = kept + added;
  float direction = momentum;
  if (step.nesterov) {
    const float ahead = step.beta1 * momentum;
    direction = g + ahead;
  }
  const float update = direction * step.step_size;
  return {old.master - update, {momentum, 0.0f}};
}

ZIGGURAT_HOST_DEVICE inline Element updated_by_rule(const OptimizerStep& step, float decay,
                                                    const Element& old, float gradient) {
  const float g = gradient * step.grad_scale;
  if (step.kind == OptimizerKind::kAdamW) return adam(step, old, g, old.master * decay);
  if (step.kind == OptimizerKind::kLion) return lion(step, old, g, decay);
  const float penalty = old.master * decay;
  const float penalised = g + penalty;
  if (step.kind == OptimizerKind::kAdam) return adam(step, old, penalised, old.master);
  if (step.kind == OptimizerKind::kAdagrad) return adagrad(step, old, penalised);
  return sgd(step, old, penalised);
}

/// Returns the updated element. `gradient` is widened, but not yet scaled. Every NaN is replaced by
/// the one that is stored.
ZIGGURAT_HOST_DEVICE inline Element updated(const OptimizerStep& step, float decay,
                                            const Element& old, float gradient) {
  Element element = updated_by_rule(step, decay, old, gradient);
  element.master = quiet(element.master);
  for (float& moment : element.moments) moment = quiet(moment);
  return element;
}

}  // namespace ziggurat::internal
