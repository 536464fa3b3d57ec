// SPDX-License-Identifier: Apache-2.0
// optimizer/slice.h: the arrays of a stretch of a record, wherever they are: what a kernel is told
// of the state that it updates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "optimizer/eight_bit.h"
#include "optimizer/rounding.h"
#include "optimizer/state_kind.h"

namespace ziggurat::internal {

inline constexpr std::size_t kMomentsMax = 2;

/// A part of a record under one decay setting, of one tile on a CPU, its arrays apart. Pointers
/// need only the alignment of their elements.
struct Slice {
  StateFormat format;

  float* master;                    ///< kFp32, kBf16Moments, k8Bit
  const bf16* param_in;             ///< kSplit, kBf16: the parameter as it was,
  bf16* param_record;               ///< and where the record holds it
  std::uint16_t* residual;          ///< kSplit
  std::byte* moments[kMomentsMax];  ///< float; in kBf16Moments and kBf16 bf16, in k8Bit codes
  float* scales[kMomentsMax];       ///< k8Bit, whose slices are whole blocks: one a block

  DType grad_dtype;
  const std::byte* grad;  ///< null: no step is made
  DType param_dtype;
  std::byte* param;  ///< null: the record's is enough

  std::size_t count;
  float decay;                ///< OptimizerStep::decay or no_decay
  NoiseKey noise_key;         ///< of all its elements
  std::uint32_t noise_index;  ///< the first one's under that key
};

constexpr std::size_t moment_bytes(StateFormat format) noexcept {
  if (format == StateFormat::k8Bit) return 1;
  return format == StateFormat::kBf16Moments || format == StateFormat::kBf16 ? 2 : 4;
}

/// How k8Bit keeps a moment: sums of squares have no sign.
constexpr EightBitCode moment_code(OptimizerKind kind, std::size_t moment) noexcept {
  const bool has_sign = moment == 0 && kind != OptimizerKind::kAdagrad;
  return has_sign ? EightBitCode::kSigned : EightBitCode::kUnsigned;
}

/// Elements [begin, end) of `slice`.
constexpr Slice part_of(const Slice& slice, std::size_t begin, std::size_t end) {
  Slice part = slice;
  if (slice.master != nullptr) part.master += begin;
  if (slice.param_in != nullptr) part.param_in += begin;
  if (slice.param_record != nullptr) part.param_record += begin;
  if (slice.residual != nullptr) part.residual += begin;
  for (std::byte*& moment : part.moments) {
    if (moment != nullptr) moment += begin * moment_bytes(slice.format);
  }
  for (float*& scales : part.scales) {
    if (scales != nullptr) scales += begin / kEightBitBlock;
  }
  if (slice.grad != nullptr) part.grad += begin * size_bytes(slice.grad_dtype);
  if (slice.param != nullptr) part.param += begin * size_bytes(slice.param_dtype);
  part.count = end - begin;
  part.noise_index += static_cast<std::uint32_t>(begin);
  return part;
}

}  // namespace ziggurat::internal
