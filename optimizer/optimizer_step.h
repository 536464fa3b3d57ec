// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizer_step.h: the optimizers, and the scalars of one of their steps.
//
// Sources: AdamW: Loshchilov & Hutter 2019, Algorithm 2; Adam: Kingma & Ba 2015, with the decay
// added to the gradient (L2); Lion: Chen et al. 2023, Algorithm 2; Adagrad: Duchi et al. 2011; SGD
// with momentum, also Nesterov's: Sutskever et al. 2013 as PyTorch writes it, with its dampening.
// All follow torch.optim if it has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace ziggurat {

enum class OptimizerKind : std::uint8_t { kAdamW, kAdam, kLion, kAdagrad, kSgd };

/// Returns a name: "adamw", "adam", "lion", "adagrad", "sgd".
std::string_view to_string(OptimizerKind kind) noexcept;
/// Returns the names in the order of OptimizerKind.
std::span<const std::string_view> optimizer_names() noexcept;
std::optional<OptimizerKind> parse_optimizer(std::string_view name) noexcept;

/// The ways to round fp32 to bf16.
enum class Rounding : std::uint8_t {
  kNearest,     ///< ties away from zero
  kStochastic,  ///< up with a probability equal to the part cut off; see optimizer/rounding.h
};

/// Returns a name: "nearest", "stochastic".
std::string_view to_string(Rounding rounding) noexcept;
/// Returns the names in the order of Rounding.
std::span<const std::string_view> rounding_names() noexcept;
std::optional<Rounding> parse_rounding(std::string_view name) noexcept;

/// The rounding of each kind of array in a step.
struct Roundings {
  /// For arrays that are kept in bf16 from step to step: moments, and the master of
  /// StateFormat::kBf16, which is the parameter. Rounded to nearest, they lose changes of less than
  /// half of their last place.
  Rounding state = Rounding::kNearest;
  /// For parameters that are made from an fp32 master, which loses nothing.
  Rounding params = Rounding::kNearest;
  friend bool operator==(const Roundings&, const Roundings&) = default;
};

/// The scalars of one step, computed once for all chunks (in double, with powers of beta by
/// repeated squaring in a fixed order).
struct OptimizerStep {
  OptimizerKind kind;
  Roundings rounding;
  float beta1, one_minus_beta1;  ///< for SGD, beta1 is the momentum
  float beta2, one_minus_beta2;
  float eps;
  float step_size;       ///< lr / (1 - beta1^t) for Adam and AdamW; otherwise lr
  float inv_bias2_sqrt;  ///< 1 / sqrt(1 - beta2^t) for Adam and AdamW
  /// The decay of an element that decays, and of one that does not. AdamW and Lion multiply the
  /// master by it (1 - lr * weight_decay, and 1); the others add master times it to the gradient
  /// (weight_decay, and 0).
  float decay, no_decay;
  /// The clip factor, divided by the accumulation divisor and the loss scale; multiplies the
  /// widened gradient. Negative if the step maximizes.
  float grad_scale;
  /// Keys stochastic rounding; made from the seed and rounding_step.
  std::uint64_t rounding_key;
  /// For SGD: the weight of the gradient in the momentum, 1 - dampening. It is 1 at t = 1, because
  /// the momentum begins as the first gradient, undamped, and 1 without momentum.
  float gradient_weight;
  bool nesterov;  ///< for SGD: the update is gradient + beta1 * momentum instead of the momentum
  /// Says that a trainer has written the parameters since the previous step
  /// (RecordView::masters_from_param).
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
    std::uint64_t seed = 0;  ///< seed of stochastic rounding
    /// The step number that keys the noise; 0 means t.
    std::uint64_t rounding_step = 0;
    float dampening = 0;    ///< for SGD: finite; has no effect without momentum
    bool nesterov = false;  ///< for SGD: has no effect without momentum
    bool maximize = false;  ///< steps go up the gradient; decay still goes towards zero
  };
  static OptimizerStep make(const Settings& settings) noexcept;
  bool operator==(const OptimizerStep&) const = default;
};

}  // namespace ziggurat
