// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient.cc: sums of squares in an order that no instruction set changes, and the clip
// coefficient.
#include "optimizer/gradient.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/numerics/typed_value.h"
#include "optimizer/kernels.h"

namespace ziggurat {
namespace {

/// Lane i takes lane i + 8, then i + 4, i + 2, i + 1.
double add_lanes(float (&lanes)[internal::kSumLanes]) {
  for (std::size_t half = internal::kSumLanes / 2; half != 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return static_cast<double>(lanes[0]);
}

/// Squares of what was written. fp32 sums of squares overflow from values of 1.8e19 on; double ones
/// do not.
double exact_sum(DType dtype, const std::byte* out, std::size_t count) {
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = value_at(dtype, out, i);
    sum = sum + value * value;
  }
  return sum;
}

}  // namespace

double round_gradient(std::span<const float> accumulator, TypedSpan<std::byte> out) noexcept {
  ZIGGURAT_CHECK(out.count() == accumulator.size(), "{} values into {} places", accumulator.size(),
                 out.count());
  double sum = 0.0;
  for (std::size_t begin = 0; begin < accumulator.size(); begin += internal::kSumBlock) {
    const std::size_t count = std::min(internal::kSumBlock, accumulator.size() - begin);
    float lanes[internal::kSumLanes] = {};
    std::byte* const to = out.bytes.data() + begin * size_bytes(out.dtype);
    internal::round_and_square(accumulator.data() + begin, out.dtype, to, count, lanes);
    const double block = add_lanes(lanes);
    sum = sum + (std::isfinite(block) ? block : exact_sum(out.dtype, to, count));
  }
  // One NaN for all: which payload an addition hands on is the compiler's choice.
  return sum != sum ? std::numeric_limits<double>::quiet_NaN() : sum;
}

void round_to_bf16(std::span<const float> values, std::span<bf16> out) noexcept {
  ZIGGURAT_CHECK(out.size() == values.size(), "{} values into {} places", values.size(),
                 out.size());
  internal::round_to_bf16(values.data(), out.data(), values.size());
}

void round_params(std::span<const float> masters, TypedSpan<std::byte> out) noexcept {
  ZIGGURAT_CHECK(out.count() == masters.size(), "{} masters into {} places", masters.size(),
                 out.count());
  switch (out.dtype) {
    case DType::kBFloat16: return round_to_bf16(masters, out.as<bf16>());
    case DType::kFloat16: {
      float squares[internal::kSumLanes] = {};
      return internal::round_and_square(masters.data(), out.dtype, out.bytes.data(), masters.size(),
                                        squares);
    }
    case DType::kFloat32: std::memcpy(out.bytes.data(), masters.data(), out.bytes.size()); return;
  }
}

float clip_coefficient(double norm, float clip_norm) noexcept {
  if (clip_norm == 0.0f) return 1.0f;
  const double coefficient = static_cast<double>(clip_norm) / (norm + 1e-6);
  return static_cast<float>(coefficient > 1.0 ? 1.0 : coefficient);  // NaN stays NaN, as in torch
}

}  // namespace ziggurat
