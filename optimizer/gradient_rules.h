// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_rules.h: the specification of what happens to one element of a gradient.
#pragma once

#include <bit>
#include <cstddef>

#include "base/dtype.h"
#include "base/numerics/host_device.h"
#include "base/numerics/rounding.h"
#include "base/numerics/typed_value.h"

namespace ziggurat::internal {

/// Rounds element `i` of `values` to `dtype` as element `i` of `out`; the square of what was
/// written. A NaN keeps its payload.
ZIGGURAT_HOST_DEVICE inline float round_and_square_at(const std::byte* values, DType dtype,
                                                      std::byte* out, std::size_t i) {
  store_value(dtype, out, i, load_element<float>(values, i));
  const float rounded = value_at(dtype, out, i);
  return rounded * rounded;
}

/// A gradient added to its accumulator.
constexpr float accumulated(float sum, float value, float scale) noexcept {
  const float scaled = value * scale;
  return quiet(sum + scaled);
}

/// Element `i` times `factor`, in place; whether what was written is finite.
ZIGGURAT_HOST_DEVICE inline bool scale_at(DType dtype, std::byte* values, std::size_t i,
                                          float factor) {
  const float product = value_at(dtype, values, i) * factor;
  store_value(dtype, values, i, quiet(product));
  const float written = value_at(dtype, values, i);
  return (std::bit_cast<std::uint32_t>(written) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace ziggurat::internal
