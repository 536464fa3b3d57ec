// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizer_step.h: which optimizer, and the scalars of one of its steps.
//
// Sources: AdamW: Loshchilov & Hutter 2019, Algorithm 2; Adam: Kingma & Ba 2015, with the decay
// added to the gradient (L2); Lion: Chen et al. 2023, Algorithm 2; Adagrad: Duchi et al. 2011; SGD
// with momentum, Nesterov's too: Sutskever et al. 2013 as PyTorch writes it, with its dampening.
// All follow torch.optim where it has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace ziggurat {

enum class OptimizerKind : std::uint8_t { kAdamW, kAdam, kLion, kAdagrad, kSgd };

/// "adamw", "adam", "lion", "adagrad", "sgd".
std::string_view to_string(OptimizerKind kind) noexcept;
/// In the order of OptimizerKind.
std::span<const std::string_view> optimizer_names() noexcept;
std::optional<OptimizerKind> parse_optimizer(std::string_view name) noexcept;

/// How fp32 becomes bf16.
enum class Rounding : std::uint8_t {
  kNearest,     ///< ties away from zero
  kStochastic,  ///< up with the probability of the part cut off; see optimizer/rounding.h
};

/// "nearest", "stochastic".
std::string_view to_string(Rounding rounding) noexcept;
/// In the order of Rounding.
std::span<const std::string_view> rounding_names() noexcept;
std::optional<Rounding> parse_rounding(std::string_view name) noexcept;

/// What of a step is rounded how.
struct Roundings {
  /// Arrays that are kept in bf16 from step to step: moments, and the master of StateFormat::kBf16,
  /// which is the parameter. Nearest, they lose what is less than half of their last place.
  Rounding state = Rounding::kNearest;
  /// Parameters that are made of an fp32 master, which loses nothing.
  Rounding params = Rounding::kNearest;
  friend bool operator==(const Roundings&, const Roundings&) = default;
};

/// The scalars of one step, computed once (in double, powers of beta by repeated squaring in a
/// fixed order) for all chunks.
struct OptimizerStep {
  OptimizerKind kind;
  Roundings rounding;
  float beta1, one_minus_beta1;  ///< SGD: beta1 is the momentum
  float beta2, one_minus_beta2;
  float eps;
  float step_size;       ///< Adam: lr / (1 - beta1^t); else lr
  float inv_bias2_sqrt;  ///< Adam: 1 / sqrt(1 - beta2^t)
  /// What decay does to an element that decays, and to one that does not. AdamW and Lion multiply
  /// the master by it (1 - lr * weight_decay, and 1); the others add master times it to the
  /// gradient (weight_decay, and 0).
  float decay, no_decay;
  /// Clip factor times 1/(accumulation divisor and loss scale): multiplies the widened gradient.
  /// Negative where the step maximizes.
  float grad_scale;
  /// From the seed and rounding_step: what stochastic rounding draws from.
  std::uint64_t rounding_key;
  /// SGD: what the gradient counts in the momentum. 1 - dampening; but 1 where t is 1, because the
  /// momentum begins as the first gradient, undamped, and 1 without momentum.
  float gradient_weight;
  bool nesterov;  ///< SGD: the update is gradient + beta1 * momentum, not the momentum
  /// A trainer has written the parameters since the step before (RecordView::masters_from_param).
  bool params_written = false;

  struct Settings {
    OptimizerKind kind = OptimizerKind::kAdamW;
    Roundings rounding{};
    float learning_rate;
    float beta1;
    float beta2;
    float eps;
    float weight_decay;
    float grad_scale;
    std::uint64_t t;         ///< number of this step, from 1
    std::uint64_t seed = 0;  ///< of stochastic rounding
    /// What keys the noise in place of t; 0: t.
    std::uint64_t rounding_step = 0;
    float dampening = 0;    ///< SGD: finite; changes nothing without momentum
    bool nesterov = false;  ///< SGD: changes nothing without momentum
    bool maximize = false;  ///< steps go up the gradient; decay still goes towards zero
  };
  static OptimizerStep make(const Settings& settings) noexcept;
  bool operator==(const OptimizerStep&) const = default;
};

}  // namespace ziggurat
