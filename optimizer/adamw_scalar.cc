// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw_scalar.cc: the specification of AdamW. Other targets are compared with this file,
// bit for bit.
//
// Every line below is one IEEE binary32 operation, rounded to nearest even, denormals kept, never
// fused (the build says -ffp-contract=off). Changing the order of two of them changes the bits of
// every training run.
#include <cmath>

#include "base/check.h"
#include "optimizer/kernels.h"

namespace ziggurat {
namespace {

/// base^exponent by repeated squaring from the lowest bit: a fixed order, where pow() is whatever
/// the libm of the day does.
double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = result * base;
    base = base * base;
  }
  return result;
}

float quiet(float value) {
  return value != value ? std::bit_cast<float>(internal::kNaNBits) : value;
}

}  // namespace

AdamWStep AdamWStep::make(const Settings& s) noexcept {
  ZIGGURAT_CHECK(s.t >= 1, "AdamW's steps count from 1, not {}", s.t);
  const double bias1 = 1.0 - power(s.beta1, s.t);
  const double bias2 = 1.0 - power(s.beta2, s.t);
  return {
      .beta1 = s.beta1,
      .one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(s.beta1)),
      .beta2 = s.beta2,
      .one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(s.beta2)),
      .eps = s.eps,
      .step_size = static_cast<float>(static_cast<double>(s.learning_rate) / bias1),
      .inv_bias2_sqrt = static_cast<float>(1.0 / std::sqrt(bias2)),
      .decay_factor = static_cast<float>(1.0 - static_cast<double>(s.learning_rate) *
                                                   static_cast<double>(s.weight_decay)),
      .grad_scale = s.grad_scale,
  };
}

void internal::scalar::adamw(const AdamWStep& step, const AdamWSlice& slice) {
  for (std::size_t i = 0; i < slice.count; ++i) {
    const float g = bf16_to_float(slice.grad[i]) * step.grad_scale;

    const float m_kept = step.beta1 * slice.exp_avg[i];
    const float m_new = step.one_minus_beta1 * g;
    const float m = m_kept + m_new;

    const float v_kept = step.beta2 * slice.exp_avg_sq[i];
    const float v_scaled =
        step.one_minus_beta2 * g;  // (1 - beta2) g first: g * g overflows from 1.8e19 on
    const float v_new = v_scaled * g;
    const float v = v_kept + v_new;

    const float root = std::sqrt(v);
    const float corrected = root * step.inv_bias2_sqrt;
    const float denominator = corrected + step.eps;
    const float direction = m / denominator;
    const float update = direction * step.step_size;

    const float decayed = slice.master[i] * slice.decay_factor;
    const float master = quiet(decayed - update);

    slice.exp_avg[i] = quiet(m);
    slice.exp_avg_sq[i] = quiet(v);
    slice.master[i] = master;
    slice.param[i] = float_to_bf16(master);
  }
}

}  // namespace ziggurat
