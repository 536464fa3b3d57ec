// SPDX-License-Identifier: Apache-2.0
// optimizer/state_kind.h: names the optimizers' states and their formats. Kernels can include this
// file, because it has nothing of what a store needs (state_format.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "optimizer/optimizer_step.h"

namespace ziggurat {

enum class StateFormat : std::uint8_t {
  kFp32,         ///< everything in fp32
  kBf16Moments,  ///< fp32 master, moments rounded to bf16: relative error of each at most 2^-8
  k8Bit,         ///< fp32 master, moments block-wise in 8 bits: see optimizer/eight_bit.h
  kSplit,        ///< the bits of kFp32, with the master in two halves: bf16 parameter and residual
  /// The bf16 parameter is the master; the relative error of each value is at most 2^-8. Rounding
  /// to nearest loses an update of less than 2^-9 of its parameter, and exp_avg_sq's decay from
  /// beta2 = 0.996 on. Stochastic rounding, which is the default, keeps both on average.
  kBf16,
};

/// Returns whether any array is kept in bf16 from step to step, so that Roundings::state applies.
/// kSplit's parameter does not count: with its residual it is an fp32 master.
constexpr bool rounds_state(StateFormat format) noexcept {
  return format == StateFormat::kBf16Moments || format == StateFormat::kBf16;
}

/// Returns 2 for AdamW and Adam (exp_avg, exp_avg_sq), 1 for Lion (exp_avg), Adagrad (sum) and SGD
/// (momentum_buffer). The names are torch.optim's.
constexpr std::size_t moment_count(OptimizerKind kind) noexcept {
  return kind == OptimizerKind::kAdamW || kind == OptimizerKind::kAdam ? 2 : 1;
}

/// Returns whether a record's first segment is the bf16 parameter itself.
constexpr bool holds_param(StateFormat format) noexcept {
  return format == StateFormat::kSplit || format == StateFormat::kBf16;
}

/// Returns whether a record's first segment is a parameter of `dtype`, bit for bit: a bf16
/// parameter that the record holds, or an fp32 parameter, which is its own master.
constexpr bool begins_with_param(StateFormat format, DType dtype) noexcept {
  return dtype == (holds_param(format) ? DType::kBFloat16 : DType::kFloat32);
}

/// What a store's records hold: the state of which optimizer, in which format.
struct StateKind {
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateFormat format = StateFormat::kFp32;
  /// Blocks of codes begin anew with each parameter of a record, and may be short: k8Bit alone (see
  /// kSharedRecordStep). A store's own kind never has it, but some of its records may.
  bool own_blocks = false;
  friend bool operator==(const StateKind&, const StateKind&) = default;
};

}  // namespace ziggurat
