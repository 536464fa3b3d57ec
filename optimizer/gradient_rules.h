// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_rules.h: the specification of the operations on one element of a gradient.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/numerics/host_device.h"
#include "base/numerics/rounding.h"
#include "base/numerics/typed_value.h"

namespace ziggurat::internal {

/// Rounds `value` to `dtype`, stores it as element `i` of `out`, and returns the square of what was
/// stored. A NaN keeps its payload.
ZIGGURAT_HOST_DEVICE inline float round_and_square_at(float value, DType dtype, std::byte* out,
                                                      std::size_t i) {
  store_value(dtype, out, i, value);
  const float rounded = value_at(dtype, out, i);
  return rounded * rounded;
}

/// Returns the accumulator `sum` plus a scaled gradient.
constexpr float accumulated(float sum, float value, float scale) noexcept {
  const float scaled = value * scale;
  return quiet(sum + scaled);
}

/// Stores `value` times `factor` as element `i` of `values`, and returns whether the result is
/// finite.
ZIGGURAT_HOST_DEVICE inline bool scale_at(float value, float factor, DType dtype, std::byte* values,
                                          std::size_t i) {
  store_value(dtype, values, i, quiet(value * factor));
  const float written = value_at(dtype, values, i);
  return (std::bit_cast<std::uint32_t>(written) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace ziggurat::internal
