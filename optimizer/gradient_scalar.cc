// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_scalar.cc: the specification of rounding a gradient and of summing its
// squares.
#include "base/numerics/typed_value.h"
#include "optimizer/gradient_rules.h"
#include "optimizer/kernels.h"

namespace ziggurat::internal::scalar {

void round_to_bf16(const float* values, bf16* out, std::size_t count) {
  auto* const to = reinterpret_cast<std::byte*>(out);
  const auto* const from = reinterpret_cast<const std::byte*>(values);
  for (std::size_t i = 0; i < count; ++i)
    store_value(DType::kBFloat16, to, i, value_at(DType::kFloat32, from, i));
}

void round_and_square(const float* values, DType dtype, std::byte* out, std::size_t count,
                      float* lanes) {
  const auto* const from = reinterpret_cast<const std::byte*>(values);
  for (std::size_t i = 0; i < count; ++i) {
    const float square = round_and_square_at(value_at(DType::kFloat32, from, i), dtype, out, i);
    lanes[i % kSumLanes] = lanes[i % kSumLanes] + square;
  }
}

}  // namespace ziggurat::internal::scalar
