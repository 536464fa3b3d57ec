// SPDX-License-Identifier: Apache-2.0
// optimizer/state_kind.h: which optimizer's state, and how it is held: the names, without what a
// store needs of them (state_format.h), so that kernels can include them.
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
  kSplit,        ///< the bits of kFp32, the master in two halves: bf16 parameter and residual
  /// The bf16 parameter is the master: relative error of each value at most 2^-8. Rounded to
  /// nearest, an update of less than 2^-9 of its parameter is lost, and so is exp_avg_sq's decay
  /// from beta2 = 0.996 on; rounded stochastically, as is the default, both are kept on average.
  kBf16,
};

/// Whether any array is kept in bf16 from step to step: what Roundings::state is about. kSplit's
/// parameter is none: with its residual it is an fp32 master.
constexpr bool rounds_state(StateFormat format) noexcept {
  return format == StateFormat::kBf16Moments || format == StateFormat::kBf16;
}

/// 2 for AdamW and Adam (exp_avg, exp_avg_sq), 1 for Lion (exp_avg), Adagrad (sum) and SGD
/// (momentum_buffer): torch.optim's names.
constexpr std::size_t moment_count(OptimizerKind kind) noexcept {
  return kind == OptimizerKind::kAdamW || kind == OptimizerKind::kAdam ? 2 : 1;
}

/// Whether a record's first segment is the bf16 parameter itself.
constexpr bool holds_param(StateFormat format) noexcept {
  return format == StateFormat::kSplit || format == StateFormat::kBf16;
}

/// Whether a record's first segment is a parameter of `dtype`, bit for bit: the bf16 one that it
/// holds, or an fp32 one, which is its own master.
constexpr bool begins_with_param(StateFormat format, DType dtype) noexcept {
  return dtype == (holds_param(format) ? DType::kBFloat16 : DType::kFloat32);
}

/// What a store's records are: whose state, and how it is held.
struct StateKind {
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateFormat format = StateFormat::kFp32;
  friend bool operator==(const StateKind&, const StateKind&) = default;
};

}  // namespace ziggurat
