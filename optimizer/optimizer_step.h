// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizer_step.h: the scalars of one step of an optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace ziggurat {

enum class OptimizerKind : std::uint8_t;  // optimizers.h has them

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
  float beta1, one_minus_beta1;  ///< beta1 is the momentum, if the optimizer has one
  float beta2, one_minus_beta2;
  float eps;
  float step_size;       ///< lr, divided by 1 - beta1^t if the optimizer corrects bias
  float inv_bias2_sqrt;  ///< 1 / sqrt(1 - beta2^t) if it does, otherwise 1
  /// The decay of an element that decays, and of one that does not. If the optimizer decouples it,
  /// the master is multiplied by it (1 - lr * weight_decay, and 1); otherwise master times it is
  /// added to the gradient (weight_decay, and 0).
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
    OptimizerKind kind{};  ///< AdamW, if nothing else is said
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
