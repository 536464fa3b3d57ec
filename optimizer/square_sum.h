// SPDX-License-Identifier: Apache-2.0
// optimizer/square_sum.h: the specification of sums of squares: the order of additions inside a
// block, which no register width and no number of threads changes.
#pragma once

#include <cstddef>
#include <limits>

#include "base/dtype.h"
#include "base/numerics/host_device.h"
#include "base/numerics/typed_value.h"

namespace ziggurat::internal {

/// The number of virtual lanes. Element i of a block goes to lane i % kSumLanes, whatever the width
/// of a register.
inline constexpr std::size_t kSumLanes = 16;
inline constexpr std::size_t kSumBlock = 4096;

/// Adds the lanes: to lane i lane i + 8, then i + 4, i + 2, i + 1.
constexpr double add_lanes(float (&lanes)[kSumLanes]) {
  for (std::size_t half = kSumLanes / 2; half != 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return static_cast<double>(lanes[0]);
}

/// Returns a block's sum from its lanes, or from its values if the lanes overflowed: fp32 sums of
/// squares overflow from values of 1.8e19 on, and sums in double do not.
ZIGGURAT_HOST_DEVICE inline double block_sum(float (&lanes)[kSumLanes], DType dtype,
                                             const std::byte* values, std::size_t count) {
  const double block = add_lanes(lanes);
  if (block - block == 0.0) return block;  // finite
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = static_cast<double>(value_at(dtype, values, i));
    const double square = value * value;
    sum = sum + square;
  }
  return sum;
}

/// Replaces every NaN by one: compilers differ in which payload an addition returns.
constexpr double quiet_sum(double sum) noexcept {
  return sum != sum ? std::numeric_limits<double>::quiet_NaN() : sum;
}

}  // namespace ziggurat::internal
