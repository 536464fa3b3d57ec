// SPDX-License-Identifier: Apache-2.0
// optimizer/slice.h: the arrays of a part of a record, in whichever memory they are. Kernels take
// the state that they update in this form.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "optimizer/eight_bit.h"
#include "optimizer/rounding.h"
#include "optimizer/state_kind.h"

namespace ziggurat::internal {

/// A part of a record under one decay setting; on a CPU, a part of one tile. Its arrays lie apart.
/// Pointers need only the alignment of their elements.
struct Slice {
  StateFormat format;

  float* master;                    ///< null if the record holds the parameter
  const bf16* param_in;             ///< if the record holds it: the parameter before the step
  bf16* param_record;               ///< if the record holds it: where
  std::uint16_t* residual;          ///< of a split master
  std::byte* moments[kMomentsMax];  ///< as the format's MomentArrays says
  float* scales[kMomentsMax];       ///< for codes, whose slices are whole blocks: one scale per
                                    ///< block

  DType grad_dtype;
  const std::byte* grad;  ///< null if no step is made
  DType param_dtype;
  std::byte* param;  ///< null if only the record holds the parameter

  std::size_t count;
  float decay;                ///< OptimizerStep::decay or no_decay
  NoiseKey noise_key;         ///< key of all elements of the slice
  std::uint32_t noise_index;  ///< index of the first element under that key
};

constexpr std::size_t moment_bytes(StateFormat format) noexcept {
  return element_bytes(info_of(moments_of(format)).element);
}

/// Returns the code of a moment that is kept in codes.
constexpr EightBitCode moment_code(OptimizerKind kind, std::size_t moment) noexcept {
  return has_sign(kind, moment) ? EightBitCode::kSigned : EightBitCode::kUnsigned;
}

/// Returns elements [begin, end) of `slice`.
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
