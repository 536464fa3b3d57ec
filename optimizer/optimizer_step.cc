// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizer_step.cc: names of roundings, and the scalars of a step from its settings.
#include "optimizer/optimizer_step.h"

#include <array>
#include <cmath>

#include "base/check.h"
#include "base/checksum.h"
#include "optimizer/optimizers.h"

namespace ziggurat {
namespace {

constexpr std::array<std::string_view, 2> kRoundings{"nearest", "stochastic"};

/// Returns base^exponent by repeated squaring from the lowest bit. This order is fixed, while pow()
/// differs between versions of libm.
double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = result * base;
    base = base * base;
  }
  return result;
}

float one_minus(float value) { return static_cast<float>(1.0 - static_cast<double>(value)); }

}  // namespace

std::string_view to_string(Rounding rounding) noexcept {
  return kRoundings[static_cast<std::size_t>(rounding)];
}

std::span<const std::string_view> rounding_names() noexcept { return kRoundings; }

std::optional<Rounding> parse_rounding(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kRoundings.size(); ++i) {
    if (kRoundings[i] == name) return static_cast<Rounding>(i);
  }
  return std::nullopt;
}

OptimizerStep OptimizerStep::make(const Settings& s) noexcept {
  ZIGGURAT_CHECK(s.t >= 1, "an optimizer's steps count from 1, not {}", s.t);
  const OptimizerInfo its = info_of(s.kind);
  const double bias1 = its.corrects_bias ? 1.0 - power(s.beta1, s.t) : 1.0;
  const double bias2 = its.corrects_bias ? 1.0 - power(s.beta2, s.t) : 1.0;
  const bool undamped = s.t == 1 || s.beta1 == 0;
  const double kept =
      1.0 - static_cast<double>(s.learning_rate) * static_cast<double>(s.weight_decay);
  return {
      .kind = s.kind,
      .rounding = s.rounding,
      .beta1 = s.beta1,
      .one_minus_beta1 = one_minus(s.beta1),
      .beta2 = s.beta2,
      .one_minus_beta2 = one_minus(s.beta2),
      .eps = s.eps,
      .step_size = static_cast<float>(static_cast<double>(s.learning_rate) / bias1),
      .inv_bias2_sqrt = static_cast<float>(1.0 / std::sqrt(bias2)),
      .decay = its.decouples_decay ? static_cast<float>(kept) : s.weight_decay,
      .no_decay = its.decouples_decay ? 1.0f : 0.0f,
      .grad_scale = s.maximize ? -s.grad_scale : s.grad_scale,
      .rounding_key = mix_seed(s.seed, s.rounding_step == 0 ? s.t : s.rounding_step),
      .gradient_weight = undamped ? 1.0f : one_minus(s.dampening),
      .nesterov = s.nesterov && s.beta1 != 0,
  };
}

}  // namespace ziggurat
