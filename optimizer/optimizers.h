// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizers.h: the optimizers: the name, arrays and settings of each, and its rule for
// one element, which is the specification. The scalar kernel and CUDA's are compiled from it;
// register code (rules_inl.h) is compared with it.
//
// Sources: AdamW: Loshchilov & Hutter 2019, Algorithm 2; Adam: Kingma & Ba 2015, with the decay
// added to the gradient (L2); Lion: Chen et al. 2023, Algorithm 2; Adagrad: Duchi et al. 2011; SGD
// with momentum, also Nesterov's: Sutskever et al. 2013 as PyTorch writes it, with its dampening.
// All follow torch.optim if it has them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/numerics/host_device.h"
#include "base/numerics/rounding.h"
#include "optimizer/optimizer_step.h"

namespace ziggurat {

enum class OptimizerKind : std::uint8_t { kAdamW, kAdam, kLion, kAdagrad, kSgd };
static_assert(OptimizerKind() == OptimizerKind::kAdamW, "the default of settings");

inline constexpr std::size_t kMomentsMax = 2;

/// What all but the rules of optimizers must know of one. Whoever has a question about an optimizer
/// asks it of this table, so that a new one is known everywhere.
struct OptimizerInfo {
  struct Moment {
    const char* name;      ///< as torch.optim calls it; null if there is none
    bool has_sign = true;  ///< false for sums and averages of squares
  };
  static constexpr double kUnread = -1;

  const char* name;   ///< in settings: "adamw"
  const char* title;  ///< the class in Python: "AdamW"
  Moment moments[kMomentsMax];
  /// The master is multiplied by its decay; otherwise decay is added to the gradient.
  bool decouples_decay = false;
  bool corrects_bias = false;  ///< of averages that begin at zero
  /// Its beta1 is a momentum, which may be dampened or Nesterov's.
  bool has_momentum = false;
  bool has_initial_accumulator = false;  ///< the first moment begins at a given value

  /// Defaults of its settings, as torch.optim has them; kUnread for what the rule does not read.
  double lr;
  double beta1 = kUnread, beta2 = kUnread;
  double eps = kUnread;
  double weight_decay = 0;
};

/// Returns the row of an optimizer; without a name for a number that is none.
constexpr OptimizerInfo info_of(OptimizerKind kind) noexcept {
  switch (kind) {
    case OptimizerKind::kAdamW:
      return {.name = "adamw",
              .title = "AdamW",
              .moments = {{"exp_avg"}, {"exp_avg_sq", false}},
              .decouples_decay = true,
              .corrects_bias = true,
              .lr = 1e-3,
              .beta1 = 0.9,
              .beta2 = 0.999,
              .eps = 1e-8,
              .weight_decay = 1e-2};
    case OptimizerKind::kAdam:
      return {.name = "adam",
              .title = "Adam",
              .moments = {{"exp_avg"}, {"exp_avg_sq", false}},
              .corrects_bias = true,
              .lr = 1e-3,
              .beta1 = 0.9,
              .beta2 = 0.999,
              .eps = 1e-8};
    case OptimizerKind::kLion:
      return {.name = "lion",
              .title = "Lion",
              .moments = {{"exp_avg"}},
              .decouples_decay = true,
              .lr = 1e-4,
              .beta1 = 0.9,
              .beta2 = 0.99};
    case OptimizerKind::kAdagrad:
      return {.name = "adagrad",
              .title = "Adagrad",
              .moments = {{"sum", false}},
              .has_initial_accumulator = true,
              .lr = 1e-2,
              .eps = 1e-10};
    case OptimizerKind::kSgd:
      return {.name = "sgd",
              .title = "SGD",
              .moments = {{"momentum_buffer"}},
              .has_momentum = true,
              .lr = 1e-3,
              .beta1 = 0};
  }
  return {};
}

/// How many optimizers there are; OptimizerKind counts them from 0.
inline constexpr std::size_t kOptimizerCount = [] {
  std::size_t count = 0;
  while (info_of(static_cast<OptimizerKind>(count)).name != nullptr) ++count;
  return count;
}();

namespace internal {

/// The answers to a question about each row of a table, in one word: kernels ask for every element,
/// and a shift is cheaper there than a switch.
template <std::size_t kRows, class Answer>
constexpr std::uint64_t packed(Answer answer) noexcept {
  static_assert(kRows <= 16, "four bits for each row");
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < kRows; ++i) word |= static_cast<std::uint64_t>(answer(i)) << (4 * i);
  return word;
}
template <class Row>
constexpr unsigned unpacked(std::uint64_t word, Row row) noexcept {
  return static_cast<unsigned>(word >> (4 * static_cast<unsigned>(row))) & 15U;
}

inline constexpr std::uint64_t kMomentCounts = packed<kOptimizerCount>([](std::size_t i) {
  return info_of(static_cast<OptimizerKind>(i)).moments[1].name == nullptr ? 1 : 2;
});
/// Bit k: the sign of moment k.
inline constexpr std::uint64_t kMomentSigns = packed<kOptimizerCount>([](std::size_t i) {
  const OptimizerInfo its = info_of(static_cast<OptimizerKind>(i));
  return (its.moments[0].has_sign ? 1 : 0) + (its.moments[1].has_sign ? 2 : 0);
});

}  // namespace internal

/// Returns 2 for AdamW and Adam (exp_avg, exp_avg_sq), 1 for Lion (exp_avg), Adagrad (sum) and SGD
/// (momentum_buffer).
constexpr std::size_t moment_count(OptimizerKind kind) noexcept {
  return internal::unpacked(internal::kMomentCounts, kind);
}

/// Returns whether a moment may be negative.
constexpr bool has_sign(OptimizerKind kind, std::size_t moment) noexcept {
  return (internal::unpacked(internal::kMomentSigns, kind) >> moment & 1U) != 0;
}

std::string_view to_string(OptimizerKind kind) noexcept;
/// Returns the names in the order of OptimizerKind.
std::span<const std::string_view> optimizer_names() noexcept;
/// Returns the names of those that have a property, for messages:
/// optimizers_that(&OptimizerInfo::has_momentum).
std::vector<std::string_view> optimizers_that(bool OptimizerInfo::*have);
std::optional<OptimizerKind> parse_optimizer(std::string_view name) noexcept;

namespace internal {

// Every line of arithmetic below is one IEEE binary32 operation, rounded to nearest even, denormals
// kept, never fused (-ffp-contract=off, --fmad=false). To change the order of two of them would
// change the bits of every training run.

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
                                         float decayed) {
  const float m = old.moments[0];
  const float c_kept = step.beta1 * m;
  const float c_new = step.one_minus_beta1 * g;
  const float c = c_kept + c_new;
  const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;  // 0 and NaN stay
  const float update = sign * step.step_size;

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
  const float decayed = old.master * decay;  // or the penalty, where decay is not decoupled
  const float penalised = g + decayed;
  switch (step.kind) {
    case OptimizerKind::kAdamW: return adam(step, old, g, decayed);
    case OptimizerKind::kAdam: return adam(step, old, penalised, old.master);
    case OptimizerKind::kLion: return lion(step, old, g, decayed);
    case OptimizerKind::kAdagrad: return adagrad(step, old, penalised);
    case OptimizerKind::kSgd: return sgd(step, old, penalised);
  }
  __builtin_unreachable();
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

}  // namespace internal
}  // namespace ziggurat
